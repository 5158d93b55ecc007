"""Holds extras of the training loop, one concern a file."""
