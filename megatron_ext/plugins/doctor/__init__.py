"""Looks for what breaks a launch, before it starts: `megatron-ext doctor`."""
