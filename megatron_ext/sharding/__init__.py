"""How data-parallel ranks divide weights, gradients and optimizer state: one protocol, a file for each scheme."""
