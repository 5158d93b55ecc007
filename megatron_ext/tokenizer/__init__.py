"""Tokenizers behind one protocol, without torch."""
