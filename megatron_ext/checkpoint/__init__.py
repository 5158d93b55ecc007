"""Sharded save and load."""
