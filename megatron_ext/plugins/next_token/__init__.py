"""The depth of multi-token prediction that computes every token."""
