"""Forkserver."""
