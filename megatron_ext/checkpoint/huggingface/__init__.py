"""Weights and tokenizers between our checkpoints and Hugging Face folders."""
