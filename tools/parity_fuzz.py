"""For whoever doubts more: trains random models in random layouts, and compares them with one process.
It is `megatron-ext parity-fuzz`: see --help."""

from command import start

if __name__ == "__main__":
    start("parity-fuzz")
