"""Norms over channels."""
