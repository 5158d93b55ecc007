"""The MLP that computes every token."""
