"""For whoever doubts: trains a few steps in one process and in a layout, and says whether, and where, they differ.
It is `megatron-ext parity`: see --help."""

from command import start

if __name__ == "__main__":
    start("parity")
