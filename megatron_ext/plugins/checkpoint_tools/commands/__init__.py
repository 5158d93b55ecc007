"""The commands that this plugin adds to `megatron-ext`, a file for each."""
