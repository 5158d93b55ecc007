"""Runs functions on ranks that are forked from a server with torch and megatron-core imported."""
