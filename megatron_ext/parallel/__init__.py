"""Layout to process groups."""
