"""The loss on held-out data: the same samples at every evaluation, each token weighted once."""

import math

import torch

from megatron_ext.config.batch import num_microbatches
from megatron_ext.train.run import HeldOut, Run
from megatron_ext.train.step import run_schedule


def evaluate(run: Run, data: HeldOut) -> float:
    """Mean loss per token over the samples of `data`, in nats; NaN if no token counts.

    Equal on every rank and in every layout. The last global batch may be a remainder: it is filled up with samples
    whose tokens do not count.
    """
    batch = run.config.training.global_batch_size
    loss_sum, total_tokens = 0.0, 0
    for chunk in run.chunks:
        chunk.eval()
    with run.gathered_parameters(), torch.no_grad():
        for start in range(0, data.samples, batch):
            microbatches = data.loader.global_batch(start, num_microbatches(run.config, batch), end=data.samples)
            loss, tokens = run_schedule(run, microbatches, forward_only=True)
            if tokens:
                loss_sum += loss * tokens
                total_tokens += tokens
    for chunk in run.chunks:
        chunk.train()
    return loss_sum / total_tokens if total_tokens else math.nan
