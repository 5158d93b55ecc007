"""Checkpoints outside of a run: written by one process, read tensor by tensor, inspected and averaged."""
