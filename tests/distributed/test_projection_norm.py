"""The norm over all heads of a token, which ranks have divided, against its formula in fp64 on whole tensors."""

from dataclasses import dataclass

import pytest
import torch

from megatron_ext.model.config import transformer_config
from megatron_ext.parts.norm.compute import ProjectionNorm
from megatron_ext.verify.ranks import run_ranks
from tests.support.small_models import small_config

RANKS, SHAPE, CHANNELS, EPSILON = 4, (5, 3), 6, 1e-3
ROUNDED = 2.0**-8 * 1.01  # bf16 has 8 bits; and what fp32 has rounded before


@dataclass
class Found:
    """What one rank has: its heads' result, and the gradients of its heads and of all weights."""

    result: torch.Tensor
    for_x: torch.Tensor
    for_weight: torch.Tensor


def _whole(heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads of all ranks, weights, and the gradient of each rank's own result."""
    torch.manual_seed(0)
    x = (3.0 * torch.randn(*SHAPE, heads, CHANNELS) + 1.0).to(dtype)
    held = max(heads // RANKS, 1)
    return x, torch.randn(heads * CHANNELS).to(dtype), torch.randn(RANKS, *SHAPE, held, CHANNELS).to(dtype)


def _own(rank: int, heads: int) -> slice:
    """The heads of a rank; with fewer heads than ranks, consecutive ranks have the same one."""
    held = max(heads // RANKS, 1)
    return slice(rank * heads // RANKS, rank * heads // RANKS + held)


def _on_a_rank(heads: int, bf16: bool) -> Found:
    torch.distributed.init_process_group("gloo")
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    assert group is not None
    config = transformer_config(small_config(training={"bf16": bf16}), "cpu")
    norm = ProjectionNorm(config, CHANNELS, EPSILON, heads=heads, tp_group=group)
    x, weight, gradients = _whole(heads, config.params_dtype)
    norm.weight.data.copy_(weight)
    held = x[:, :, _own(rank, heads)].contiguous().requires_grad_()
    result = norm(held)
    result.backward(gradients[rank])
    assert held.grad is not None
    assert norm.weight.grad is not None
    return Found(result.detach(), held.grad, norm.weight.grad)


def _assert_close(got: torch.Tensor, exact: torch.Tensor, sizes: torch.Tensor, bf16: bool) -> None:
    """In bf16 each number that a rank gives is rounded once; `sizes` are the sums of their absolute values."""
    if bf16:
        assert ((got - exact).abs() <= sizes * ROUNDED + 1e-5).all()
    else:
        torch.testing.assert_close(got, exact, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("heads", [8, 2])
def test_equals_its_formula_on_the_heads_of_all_ranks(heads: int, bf16: bool) -> None:
    found = run_ranks(RANKS, _on_a_rank, heads, bf16)
    x, weight, gradients = (tensor.double() for tensor in _whole(heads, found[0].result.dtype))
    x.requires_grad_()
    weight.requires_grad_()
    mean = x.square().mean((-1, -2), keepdim=True)
    result = x / (mean + EPSILON).sqrt() * weight.view(heads, CHANNELS)
    parts = [result[:, :, _own(rank, heads)] for rank in range(RANKS)]
    torch.autograd.backward(parts, list(gradients))
    assert x.grad is not None

    for_x, sizes = torch.zeros_like(x), torch.zeros_like(x)
    for rank, (one, part) in enumerate(zip(found, parts, strict=True)):
        _assert_close(one.result.double(), part, part.abs(), bf16)
        for_x[:, :, _own(rank, heads)] += one.for_x.double()
        sizes[:, :, _own(rank, heads)] += one.for_x.double().abs()
    _assert_close(for_x, x.grad, sizes, bf16)
    assert weight.grad is not None
    of_ranks = torch.stack([one.for_weight.double() for one in found])
    _assert_close(of_ranks.sum(0) / 10, weight.grad / 10, of_ranks.abs().sum(0) / 10, bf16)
