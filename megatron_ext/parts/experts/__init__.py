"""A mixture of experts, in the place of an MLP."""
