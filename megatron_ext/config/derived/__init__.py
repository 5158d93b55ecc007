"""Computes what follows from a resolved configuration: batches, ranks, stages, optimizer traits."""
