"""Bounded readers of what anybody may have written: text, files of a folder, pickles. Nothing in it is executed."""
