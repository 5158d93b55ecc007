"""Checkpoints: saved in shards and loaded, from and to Hugging Face, and from Megatron-LM."""
