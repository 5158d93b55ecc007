"""Bounded readers of untrusted input: text, files of a folder, pickles. Nothing in it is executed."""
