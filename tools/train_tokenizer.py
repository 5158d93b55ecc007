"""Trains a tokenizer on text files. It is `megatron-ext train-tokenizer`: see --help."""

from command import start

if __name__ == "__main__":
    start("train-tokenizer")
