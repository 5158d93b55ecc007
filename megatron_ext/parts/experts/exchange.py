"""Gathers the tokens of all ranks, and adds up their experts' outputs, between CPU processes.

Each rank sends every other one its part at once. Gloo's all-gather and reduce-scatter hand parts on from rank to rank:
with two of them a megabyte takes two and three times as long. Shapes: T rows of one rank, n ranks, W columns.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import all_to_all
from torch.distributed import ProcessGroup


def gathered(x_TW: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return the rows of all ranks, [n T, W], one rank after another. Gradients are added up as by `added`."""
    return _Gather.apply(x_TW, group)  # pyright: ignore[reportReturnType]


def added(x_NW: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return this rank's rows, [T, W], of the sum over all ranks of x, [n T, W].

    Parts are added in the order of gloo's reduce-scatter: from the rank before on backwards, this rank's own last.
    """
    parts, rank = all_to_all(group, x_NW).chunk(group.size()), group.rank()
    total = parts[rank - 1]
    for before in range(2, group.size() + 1):
        total = total + parts[rank - before]
    return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TW: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_to_all(group, x_TW.repeat(group.size(), 1))

    @staticmethod
    def backward(ctx: Any, grad_NW: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return added(grad_NW, ctx.group), None
