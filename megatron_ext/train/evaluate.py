"""Validation loss: the same samples at every evaluation, each token weighted once."""

import math

import torch

from megatron_ext.config.batch import num_microbatches
from megatron_ext.train.run import Run
from megatron_ext.train.step import run_schedule


def evaluate(run: Run) -> float:
    """Mean loss per token over the validation samples, in nats. Equal on every rank and in every layout.

    The last global batch may be a remainder: it is filled up with samples whose tokens do not count.
    """
    batch = run.config.training.global_batch_size
    samples = run.loaders.validation_samples
    assert run.loaders.valid is not None, "there is validation data"
    loss_sum, total_tokens = 0.0, 0
    for chunk in run.chunks:
        chunk.eval()
    with run.gathered_parameters(), torch.no_grad():
        for start in range(0, samples, batch):
            microbatches = run.loaders.valid.global_batch(start, num_microbatches(run.config, batch), end=samples)
            loss, tokens = run_schedule(run, microbatches, forward_only=True)
            loss_sum += loss * tokens
            total_tokens += tokens
    for chunk in run.chunks:
        chunk.train()
    return loss_sum / total_tokens if total_tokens else math.nan
