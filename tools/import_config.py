"""Prints the flags of ours that another program's configuration file means. It is `megatron-ext import-config`: see
--help."""

from command import start

if __name__ == "__main__":
    start("import-config")
