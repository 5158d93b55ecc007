"""Sends metrics to experiment trackers."""
