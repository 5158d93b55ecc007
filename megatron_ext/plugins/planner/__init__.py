"""Searches the layouts of a model for the fastest that fits, and draws pipelines."""
