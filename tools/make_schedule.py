"""Makes a pipeline's schedule for measured times and a limit of memory, as a file for --pipeline-schedule. It is
`megatron-ext make-schedule`: see --help."""

from command import start

if __name__ == "__main__":
    start("make-schedule")
