"""Turns text into the .bin/.idx files that training reads. It is `megatron-ext preprocess`: see --help."""

from command import start

if __name__ == "__main__":
    start("preprocess")
