"""Look into checkpoints. It is `megatron-ext inspect-checkpoint`: see --help."""

from command import start

if __name__ == "__main__":
    start("inspect-checkpoint")
