"""Says how many tokens at a time --linear-cross-entropy takes, by device."""

LOSS_CHUNKS = {"cpu": 128, "cuda": 4096}
"""Every chunk reads and writes the fp32 gradient of the whole output layer once: on a GPU that must be little compared
with its products. On a CPU the logits of 128 tokens, for a vocabulary of 50,000, are a block that the allocator keeps
(`device.kept_memory`): of 256 tokens the system hands out every chunk's memory anew, page by page; of 64 the gradient
is read and written too often (benchmarks/operations.py --heads)."""
