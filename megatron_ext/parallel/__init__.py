"""Turns a layout into process groups."""
