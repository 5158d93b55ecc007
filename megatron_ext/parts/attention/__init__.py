"""Self-attention: its description, its ways of computation, positions, and the choice of kernels."""
