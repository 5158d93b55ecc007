"""Optimizer wiring, parameter groups, learning-rate and weight-decay curves."""
