"""Draws one step of a pipeline: which stage works on which microbatch when, what waits, and each stage's memory. It
is `megatron-ext draw-pipeline`: see --help."""

from command import start

if __name__ == "__main__":
    start("draw-pipeline")
