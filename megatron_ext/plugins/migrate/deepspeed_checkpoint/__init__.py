"""Reads checkpoints that Megatron-DeepSpeed and GPT-NeoX wrote."""
