"""Says how many tokens at a time --linear-cross-entropy takes, by device."""

LOSS_CHUNKS = {"cpu": 256, "cuda": 4096}
"""Every chunk reads and writes the fp32 gradient of the whole output layer once: on a GPU that must be little compared
with its products."""
