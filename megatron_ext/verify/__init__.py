"""Proof: launch ranks, compare runs by global parameter name, plant faults."""
