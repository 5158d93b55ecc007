"""Moves weights and tokenizers between our checkpoints and Hugging Face folders."""
