"""Computes with the averages of the weights in place of the weights: those of --ema-decay, or of an optimizer's own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_ext.config.derived.optimizers import AVERAGE
from megatron_ext.sharding.parts import OptimizerPart


@contextmanager
def averaged(parts: Sequence[OptimizerPart]) -> Iterator[None]:
    """Exchange weights and averages inside, in whatever scheme; before the first update nothing. Collective.

    Args:
        parts: those of the run's optimizer, none in host memory.
    """
    _exchange(parts)
    try:
        yield
    finally:
        _exchange(parts)


@torch.no_grad()
def _exchange(parts: Sequence[OptimizerPart]) -> None:
    for part in parts:
        for _, main in part.main_parameters():
            optimizer, updated = part.updater.updated_by(main)
            average = optimizer.state[updated].get(AVERAGE)
            if average is not None:
                weight = main.clone()
                main.copy_(average)
                average.copy_(weight)
        # The engine makes weights of the masters, and gathers them, after an update: here of one that changes nothing.
        part.core.optimizer.step = lambda: None
        try:
            part.core.step_with_ready_grads()
        finally:
            del part.core.optimizer.step
