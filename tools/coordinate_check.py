"""Checks that activations keep their size as a model gets wider: what --use-mup is for. It is `megatron-ext
coordinate-check`: see --help."""

from command import start

if __name__ == "__main__":
    start("coordinate-check")
