"""Replay a step of a run in one process, from its checkpoint and its samples. It is `megatron-ext replay-step`: see
--help."""

from command import start

if __name__ == "__main__":
    start("replay-step")
