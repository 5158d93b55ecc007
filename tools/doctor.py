"""Looks for what breaks a launch, before it starts, in a few seconds. It is `megatron-ext doctor`: see --help."""

from command import start

if __name__ == "__main__":
    start("doctor")
