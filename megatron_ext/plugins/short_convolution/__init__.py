"""LFM2's gated short convolution: a mixer that sees the latest few positions."""
