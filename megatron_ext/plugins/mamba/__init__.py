"""Mamba-2: a linear recurrence over a state of each head, whose decay follows from the input."""
