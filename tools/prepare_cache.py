"""Build the index cache of a run before it starts, with no GPU and no process group, from the flags of the training.
It is `megatron-ext prepare-cache`: see --help."""

from command import start

if __name__ == "__main__":
    start("prepare-cache")
