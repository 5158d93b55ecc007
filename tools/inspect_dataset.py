"""Look into a .bin/.idx pair, or prove that it is whole; or show what a training step read. It is `megatron-ext
inspect-dataset`: see --help."""

from command import start

if __name__ == "__main__":
    start("inspect-dataset")
