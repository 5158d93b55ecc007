"""Reads what the user typed: flags, files of flags, help."""
