"""Holds the checkpoints of this program: saved in shards, verified, loaded into any layout."""
