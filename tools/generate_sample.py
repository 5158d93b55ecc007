"""Generates a sample of text from an exported model, by transformers alone: nothing of this repository computes it.
It is `megatron-ext sample`: see --help."""

from command import start

if __name__ == "__main__":
    start("sample")
