"""Merges all .bin/.idx pairs of a folder into one pair. It is `megatron-ext merge-datasets`: see --help."""

from command import start

if __name__ == "__main__":
    start("merge-datasets")
