"""The programs that people start: `megatron-ext` and its subcommands. The scripts in tools/ call the same functions."""
