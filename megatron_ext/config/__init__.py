"""Holds what the user asked for, resolved and checked, without torch."""
