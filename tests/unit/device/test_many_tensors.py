"""Operations over many tensors: the bits of torch's loops, in one launch."""

import math
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

from megatron_ext.device.many_tensors import copy_, lerp_, scale_
from tests.support.operator_calls import Calls

SIZES = ((1,), (7,), (33, 65), (300, 20), (5000,), ())


def drawn(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def launched(calls: Calls) -> list[str]:
    """Operators that a GPU would start a kernel for."""
    names = [str(operator) for operator, _, _ in calls.calls]
    return [name for name in names if not name.startswith(("aten.detach", "aten.lift_fresh"))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("decay", [0.999, 0.7, 0.3])
def test_averages_move_in_one_launch_with_the_bits_of_a_loop(decay: float, dtype: torch.dtype) -> None:
    expected, averages, weights = drawn(0, dtype), drawn(0, dtype), drawn(1, dtype)
    with Calls() as one_by_one:
        for average, weight in zip(expected, weights, strict=True):
            average.lerp_(weight, 1.0 - decay)
    with Calls() as calls:
        lerp_(averages, weights, 1.0 - decay)
    assert all(map(torch.equal, averages, expected))
    assert (len(launched(one_by_one)), launched(calls)) == (len(SIZES), ["aten._foreach_lerp_.Scalar"])
    if decay > 0.5:
        known = drawn(0, dtype)
        get_ema_multi_avg_fn(decay)(known, weights, torch.tensor(1))  # pyright: ignore[reportArgumentType]
        assert all(map(torch.equal, averages, known))


@pytest.mark.parametrize("open", [True, False])
def test_a_share_on_the_device_moves_averages_or_none(open: bool) -> None:
    """With the bits of a number: what is masked on a GPU is the average that a CPU keeps."""
    expected, averages, weights = drawn(0), drawn(0), drawn(1)
    if open:
        lerp_(expected, weights, 1e-3)
    lerp_(averages, weights, 1e-3 * torch.tensor(open))
    assert all(map(torch.equal, averages, expected))


@pytest.mark.parametrize("factor", [1.0, 0.25, 0.123456789, 0.0, math.nan])
def test_tensors_are_scaled_in_one_launch_with_the_bits_of_a_loop(factor: float) -> None:
    given, share = drawn(0), torch.tensor(factor)
    expected = [one * share for one in given]
    with Calls() as calls:
        scale_(given, share)
    torch.testing.assert_close(given, expected, rtol=0, atol=0, equal_nan=True)
    assert launched(calls) == ["aten._foreach_mul_.Tensor"]


def test_copies_of_other_types_are_one_launch() -> None:
    sources = drawn(0)
    copies: Any = [torch.empty_like(one, dtype=torch.bfloat16) for one in sources]
    with Calls() as calls:
        copy_(copies, sources)
        copy_([], [])
        scale_([], torch.tensor(0.5))
        lerp_([], [], 0.5)
    assert all(torch.equal(copy, one.bfloat16()) for copy, one in zip(copies, sources, strict=True))
    assert launched(calls) == ["aten._foreach_copy_.default"]
