"""Says which layout to use for this model on these devices, and why. It is `megatron-ext plan`: see --help."""

from command import start

if __name__ == "__main__":
    start("plan")
