"""Finds a NaN or an infinity: one fused check, and a search by name only where it fails. To test how a run handles a
bad number, it also chooses the steps that --error-injection-rate spoils.
"""

import math
import random
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.nn.utils import get_total_norm

from megatron_ext import environment
from megatron_ext.config.schema import Config


class BadTensor(NamedTuple):
    """The first tensor that is not finite, and how many of its elements are not."""

    name: str
    nan: int
    inf: int


def largest_magnitude(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the largest magnitude in any of the tensors, a scalar on `device`; NaN where one holds a NaN, 0 without
    elements.

    It does not wait for a device that holds the tensors, unless `device` is another one.
    """
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    if not nonempty:
        return torch.zeros((), dtype=torch.float64, device=device)
    # Unlike a sum or a square, it cannot overflow.
    return get_total_norm(nonempty, norm_type=math.inf).to(device, torch.float64)


def first_bad(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> BadTensor | None:
    """Return the first of the tensors that holds a NaN or an infinity; None if all are finite.

    It costs one read of the tensors and one wait for the device. Tensors without elements, and of integers, are fine.

    Args:
        named_tensors: any shapes and devices.
    """
    candidates = [(name, tensor) for name, tensor in named_tensors if tensor.is_floating_point() and tensor.numel()]
    largest = largest_magnitude((tensor for _, tensor in candidates), torch.device("cpu"))
    if math.isfinite(largest.item()):
        return None
    return next(bad for name, tensor in candidates if (bad := _count(name, tensor)) is not None)


def _count(name: str, tensor: torch.Tensor) -> BadTensor | None:
    nan, inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
    return BadTensor(name, nan, inf) if nan or inf else None


def is_spoiled(config: Config, samples: range, rank: int) -> bool:
    """Return whether a rank gives a NaN for its loss in the step of the samples at these positions.

    Each step of each rank is one of the rate's results, as in megatron-core's RerunErrorInjector, and at most one rank
    of a step is chosen (of no more ranks than the rate). Which one follows from the seed and the step's samples alone,
    whatever the layout of the ranks: a step that is taken again is spoiled again, as by a machine that always computes
    so (persistent_error) or by data and settings that are bad (correct_result), which look alike on one machine. With
    transient_error it also follows from how often the ranks were started: after a restart, the step is computed well.
    """
    training = config.training
    rate = training.error_injection_rate
    if rate == 0:
        return False
    start = environment.attempt() if training.error_injection_type == "transient_error" else 0
    draw = random.Random(f"{training.seed} {samples.start} {start}")
    return (draw.randrange(rate) + rank) % rate == 0
