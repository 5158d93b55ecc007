"""Mamba-1's selective scan: a linear recurrence whose states decay channel by channel, each number by its own rate."""
