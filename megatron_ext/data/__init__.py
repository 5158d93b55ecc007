"""The data of a run: corpus, sampler, batches, synthetic data."""
