"""`python -m megatron_ext` is `megatron-ext`, also where torchrun starts the ranks (`torchrun ... -m megatron_ext`)."""

from megatron_ext.cli.main import start

if __name__ == "__main__":
    start()
