"""Begins the file of a type of Hugging Face model from transformers' class of it. It is `megatron-ext new-family`: see
--help."""

from command import start

if __name__ == "__main__":
    start("new-family")
