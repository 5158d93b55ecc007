"""Everything that a plain pretraining run does not need: each folder is a plugin (`megatron_ext/registry.py`)."""
