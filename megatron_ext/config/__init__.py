"""The user's configuration, resolved and checked, without torch."""
