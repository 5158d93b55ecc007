"""Convert between our checkpoints and Hugging Face folders, on one CPU process, a block of a file at a time. It is
`megatron-ext convert`: see --help."""

from command import start

if __name__ == "__main__":
    start("convert")
