"""Snapshots of a run in the memory of its machines, which a restart finds before the last checkpoint."""
