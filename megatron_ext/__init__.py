"""Pretraining of GPT models on megatron-core. Importing this package imports nothing heavy."""

__version__ = "0.2.0"
