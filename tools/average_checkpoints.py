"""Averages the weights of several checkpoints of a run. It is `megatron-ext average-checkpoints`: see --help."""

from command import start

if __name__ == "__main__":
    start("average-checkpoints")
