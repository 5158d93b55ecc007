"""The product with the matrices of several experts: in one call, and one after another."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.device import kernels
from megatron_ext.device.kernels import grouped_linear, linear_by_expert
from megatron_ext.parts.experts.compute import can_group
from tests.support.operator_calls import aten

COUNTS = ([5, 0, 7, 1], [0, 0, 0, 0], [0, 13, 0, 0], [8, 8, 8, 8])
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("device", DEVICES)
def test_one_call_gives_what_one_after_another_gives(device: str, counts: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), 24, generator=generator).to(device, torch.bfloat16).requires_grad_()
    weight = torch.randn(4, 40, 24, generator=generator).to(device, torch.bfloat16).requires_grad_()
    upstream = torch.randn(sum(counts), 40, generator=generator).to(device, torch.bfloat16)
    assert can_group(x, weight)
    results = []
    for product in (grouped_linear, linear_by_expert):
        y = product(x, weight, torch.tensor(counts))
        results.append((y.detach(), *torch.autograd.grad(y, (x, weight), upstream)))
    for one, other in zip(*results, strict=True):
        if device == "cpu":
            assert torch.equal(one, other)
        else:  # other kernels, other orders of summation
            torch.testing.assert_close(one, other)


class UnwrittenGroups(TorchDispatchMode):
    """The grouped product of a Blackwell GPU: what has no rows keeps what was in memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is aten._grouped_mm.default and made.dim() == 3:  # [E, ...]: the gradient of the matrices
            made[args[2].diff(prepend=args[2].new_zeros(1)) == 0] = float("nan")
        return made


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("leaves", [False, True])
def test_matrices_without_rows_get_no_gradient_where_a_gpu_writes_none(
    counts: list[int], leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "leaves_empty_groups", lambda _x: leaves)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(counts), 24, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(4, 40, 24, generator=generator).bfloat16().requires_grad_()
    upstream = torch.randn(sum(counts), 40, generator=generator).bfloat16()
    expected = torch.autograd.grad(linear_by_expert(x, weight, torch.tensor(counts)), (x, weight), upstream)
    with UnwrittenGroups():
        made = torch.autograd.grad(grouped_linear(x, weight, torch.tensor(counts)), (x, weight), upstream)
    assert torch.equal(made[0], expected[0])
    assert torch.equal(made[1], expected[1]) == (leaves or 0 not in counts)


@pytest.mark.parametrize("counts", COUNTS)
def test_one_after_another_is_the_plain_product(counts: list[int]) -> None:
    x = torch.randn(sum(counts), 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    whose = torch.arange(4).repeat_interleave(torch.tensor(counts))
    y = linear_by_expert(x, weight, torch.tensor(counts))
    expected = torch.einsum("ti,toi->to", x, weight[whose])
    torch.testing.assert_close(y, expected)
    upstream = torch.randn_like(y)
    gradients = torch.autograd.grad(y, (x, weight), upstream)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (x, weight), upstream))


@pytest.mark.parametrize(
    ("dtype", "shape", "works"),
    [
        (torch.bfloat16, (2, 16, 8), True),
        (torch.bfloat16, (2, 16, 12), False),  # rows of 24 bytes: the kernel reads 16 at a time
        (torch.bfloat16, (2, 12, 16), False),
        (torch.float32, (2, 16, 8), False),
    ],
)
def test_what_one_call_can_do(dtype: torch.dtype, shape: tuple[int, ...], works: bool) -> None:
    assert can_group(torch.zeros(3, shape[2], dtype=dtype), torch.zeros(shape, dtype=dtype)) == works
