"""Holds what other programs and other versions call things, and what becomes of it here."""
