"""Gathers the tokens of all ranks, and adds up what their experts gave, between CPU processes.

Each rank sends every other one its part at once (all-to-all). Gloo's all-gather and reduce-scatter hand parts on from
rank to rank, and add them up in pieces: with two ranks and a megabyte they take twice and three times as long.

Shapes: T rows of one rank, n ranks, W columns.
"""

from typing import Any

import torch
from torch.distributed import ProcessGroup


def gathered(x_TW: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return the rows of all ranks, [n T, W], one rank after another. The gradients of a rank's are added up."""
    return _Gather.apply(x_TW, group)  # pyright: ignore[reportReturnType]


def added(x_NW: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return this rank's rows, [T, W], of the sum over all ranks of x, [n T, W]."""
    return _Add.apply(x_NW, group)  # pyright: ignore[reportReturnType]


def _all_to_all(x_NW: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    arrived = torch.empty_like(x_NW)
    torch.distributed.all_to_all_single(arrived, x_NW, group=group)
    return arrived


def _gather(x_TW: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    return _all_to_all(x_TW.repeat(group.size(), 1), group)


def _add(x_NW: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Add parts in the order of gloo's reduce-scatter: from the rank before on backwards, this rank's own last."""
    parts = _all_to_all(x_NW.contiguous(), group).chunk(group.size())
    total = parts[group.rank() - 1]
    for before in range(2, group.size() + 1):
        total = total + parts[group.rank() - before]
    return total


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TW: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _gather(x_TW, group)

    @staticmethod
    def backward(ctx: Any, grad_NW: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _add(grad_NW, ctx.group), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NW: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _add(x_NW, group)

    @staticmethod
    def backward(ctx: Any, grad_TW: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _gather(grad_TW, ctx.group), None
