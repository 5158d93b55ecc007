"""Proves the program right: launches ranks, compares runs by global parameter name, plants faults."""
