"""Optimizer settings, learning-rate and weight-decay curves."""
