"""Computes the loss on held-out data: the same samples at every evaluation, each token weighted once."""

import math
from dataclasses import dataclass

import torch

from megatron_ext.config.derived.batch import evaluation_batch, num_microbatches
from megatron_ext.resilience.progress import EVALUATION
from megatron_ext.train.run import HeldOut, HeldOutPart, Run
from megatron_ext.train.step import held_out_loss


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss in nats per token, each token weighted once; NaN where none counts."""

    all: float
    parts: tuple[float, ...]
    """Loss of each source."""


def evaluate(run: Run, data: HeldOut) -> float:
    """Return the mean loss per token over the samples of `data`, in nats; NaN if no token counts."""
    return evaluate_sources(run, data).all


def evaluate_sources(run: Run, data: HeldOut) -> HeldOutLoss:
    """Return the mean loss per token over the samples of `data`, and over those of each source.

    The result is equal on every rank and in every layout. The last global batch of a source may be a remainder: it is
    filled up with samples whose tokens do not count.
    """
    for chunk in run.chunks:
        chunk.eval()
    with run.gathered_parameters(), torch.no_grad():
        sums = [_sum(run, data, part) for part in data.parts]
    for chunk in run.chunks:
        chunk.train()
    loss, tokens = (sum(values) for values in zip(*sums, strict=True))
    return HeldOutLoss(_mean(loss, tokens), tuple(_mean(*part) for part in sums))


def _sum(run: Run, data: HeldOut, part: HeldOutPart) -> tuple[float, int]:
    """Return the sum of the losses of one source, and the number of its tokens that count."""
    batch, micro_batch = evaluation_batch(run.config)
    loss_sum, total_tokens = 0.0, 0
    for start in range(part.positions.start, part.positions.stop, batch):
        count = num_microbatches(run.config, batch, micro_batch)
        with run.progress.loading():
            microbatches = data.loader.global_batch(start, count, end=part.positions.stop)
        run.progress.begin_batch(EVALUATION)
        loss, tokens = held_out_loss(run, microbatches)
        if tokens:
            loss_sum += loss * tokens
            total_tokens += tokens
    return loss_sum, total_tokens


def _mean(loss_sum: float, tokens: int) -> float:
    return loss_sum / tokens if tokens else math.nan
