"""Compare runs: settings, losses, speed, curves; or float for float. It is `megatron-ext compare`: see --help."""

from command import start

if __name__ == "__main__":
    start("compare")
