"""Preparing text: from text files to .bin/.idx pairs."""
