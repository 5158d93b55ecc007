"""Corpus, sampler, batches, synthetic data."""
