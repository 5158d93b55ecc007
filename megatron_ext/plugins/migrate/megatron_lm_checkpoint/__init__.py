"""Reads checkpoints that Megatron-LM wrote."""
