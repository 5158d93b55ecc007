"""Values derived from a resolved configuration: batches, ranks, stages, optimizer traits."""
