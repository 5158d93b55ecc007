"""Errors that no step notices: copies of weights that are not equal, and losses that leap."""
