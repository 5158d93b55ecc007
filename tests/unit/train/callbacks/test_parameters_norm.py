"""The norm of all parameters counts each once, in full precision."""

import math

import pytest
import torch

from megatron_ext.train.callbacks.parameters_norm import parameters_norm
from tests.support.small_runs import built


def _fill(run: object, value: float) -> int:
    """Give every weight one value, and return how many elements there are."""
    parameters = [weight for chunk in run.chunks for weight in chunk.parameters()]  # pyright: ignore
    for weight in parameters:
        weight.data.fill_(value)
    return sum(weight.numel() for weight in parameters)


def test_every_weight_counts_once() -> None:
    """Experts too; a copy that is tied to another stage's does not count again."""
    for flags in ("", "--num-experts 4 --disable-bias-linear"):
        with built(flags) as run:
            elements = _fill(run, 0.5)
            assert parameters_norm(run) == pytest.approx(0.5 * math.sqrt(elements), rel=1e-12)
            weight = next(iter(run.chunks[0].parameters()))
            weight.shared = True  # pyright: ignore[reportAttributeAccessIssue]
            assert parameters_norm(run) == pytest.approx(0.5 * math.sqrt(elements - weight.numel()), rel=1e-12)


def test_squares_of_16_bit_weights_are_not_rounded() -> None:
    """(1 + 2^-7)^2 has 15 bits, of which bf16 holds 8."""
    with built("--bf16") as run:
        elements = _fill(run, 1.0 + 2.0**-7)
        assert next(iter(run.chunks[0].parameters())).dtype == torch.bfloat16
        assert parameters_norm(run) == pytest.approx((1.0 + 2.0**-7) * math.sqrt(elements), rel=1e-12)
