"""Compare the metrics files of two runs, float for float. It is `megatron-ext compare`: see --help."""

from command import start

if __name__ == "__main__":
    start("compare")
