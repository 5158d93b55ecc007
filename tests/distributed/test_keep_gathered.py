"""A column-parallel layer that keeps what it gathers (--sequence-parallel-keep-gathered), next to megatron-core's."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication

from megatron_ext import device
from megatron_ext.parts.linear.compute import _GatheredLinear
from megatron_ext.verify.ranks import run_ranks


def _compare() -> list[tuple[bool, list[bool], tuple[int, int]]]:
    """Return of products with and without a bias: whether the outputs are equal, whether each gradient is, and how
    many gathers the backward pass of each made."""
    device.install("cpu")
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group: Any = parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for biased in (False, True):
        x, weight, bias = (
            torch.randn(shape, generator=generator, requires_grad=True) for shape in ((6, 3, 16), (24, 16), (24,))
        )
        given = [x, weight, *([bias] if biased else [])]
        grad = torch.randn(12, 3, 24, generator=generator)
        kept: Any = _GatheredLinear.apply(x, weight, bias if biased else None, group)
        settings = (False, False, True, None, None, group, 1)
        theirs: Any = LinearWithGradAccumulationAndAsyncCommunication.apply(
            x, weight, bias if biased else None, *settings
        )
        ours, gathers = _gradients(kept, given, grad)
        expected, of_theirs = _gradients(theirs, given, grad)
        equal = [torch.equal(one, other) for one, other in zip(ours, expected, strict=True)]
        found.append((torch.equal(kept, theirs), equal, (gathers, of_theirs)))
    return found


def _gradients(output: torch.Tensor, inputs: list[torch.Tensor], grad: torch.Tensor) -> tuple[Any, int]:
    """Return the gradients, and the number of gathers that it took to make them."""
    with torch.profiler.profile() as profile:
        gradients = torch.autograd.grad(output, inputs, grad)
    return gradients, sum(event.name == "c10d::_allgather_base_" for event in profile.events() or ())


def test_the_bits_are_those_of_gathering_again() -> None:
    for of_rank in run_ranks(2, _compare):
        assert of_rank == [(True, [True] * count, (0, 1)) for count in (2, 3)]
