"""Stopping and failing well: signals, numeric guard, exit report."""
