"""Products of tensor-parallel layers that compute while they communicate (--tp-comm-overlap).

Under sequence parallelism a column-parallel layer gathers its input over the tensor-parallel ranks and multiplies; a
row-parallel layer multiplies and sums, each rank its slice of the sequence. In the backward pass the two change places.
torch's operators do each pair a slice at a time, and copy the next slice between the GPUs meanwhile:

    Y = gather(X) A^T        fused_all_gather_matmul         dX = scatter_sum(dY A)    fused_matmul_reduce_scatter
    Y = scatter_sum(X A^T)   fused_matmul_reduce_scatter     dX = gather(dY) A         fused_all_gather_matmul

Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models" (ASPLOS), section 3, which decomposes both pairs. Sums over ranks may be added in another order than NCCL's.

Shapes: S tokens of a sample, B samples, H columns of A, V rows of A, of this rank each.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_ext.device.symmetric_memory import gather_multiply, multiply_scatter
from megatron_ext.device.weight_gradients import add_product_, replaces_gradient

Adds = Callable[[torch.Tensor, torch.Tensor], None]
"""Adds grad_NV^T x_NH to a weight's main gradient, given both."""


def adds_to(weight: torch.Tensor, fuses: bool) -> Adds | None:
    """Return the product that adds to the main gradient of `weight` with --gradient-accumulation-fusion (`fuses`); None
    where autograd gets the gradient."""
    main_grad: Any = getattr(weight, "main_grad", None)
    return partial(add_product_, main_grad) if fuses and main_grad is not None else None


def column_parallel(
    slice_SBH: torch.Tensor,
    weight_VH: torch.Tensor,
    bias_V: torch.Tensor | None,
    group: ProcessGroup,
    adds: Adds | None,
) -> torch.Tensor:
    """Return gather(X) A^T + b, [S, B, V], differentiable.

    Args:
        slice_SBH: this rank's slice of the sequence.
        group: the tensor-parallel ranks.
        adds: see `adds_to`.
    """
    y: Any = _Columns.apply(slice_SBH, weight_VH, bias_V, group, adds)
    return y


def row_parallel(x_SBH: torch.Tensor, weight_VH: torch.Tensor, group: ProcessGroup, adds: Adds | None) -> torch.Tensor:
    """Return this rank's slice of the sum of X A^T over the ranks, [S / ranks, B, V], differentiable.

    Args:
        x_SBH: this rank's columns of the whole sequence.
        group: the tensor-parallel ranks.
        adds: see `adds_to`.
    """
    y: Any = _Rows.apply(x_SBH, weight_VH, group, adds)
    return y


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        slice_SBH: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: ProcessGroup,
        adds: Adds | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(slice_SBH, weight)
        ctx.group, ctx.adds = group, adds
        _, y = gather_multiply(slice_SBH, weight.t(), group, keeps=False)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad_SBV: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        slice_SBH, weight = ctx.saved_tensors
        for_slice_too, for_weight_too, for_bias_too, *_ = ctx.needs_input_grad
        x_SBH, arrives = None, None
        if for_weight_too:  # which begins before the product that hides it
            x_SBH = slice_SBH.new_empty(slice_SBH.size(0) * ctx.group.size(), *slice_SBH.shape[1:])
            arrives = torch.distributed.all_gather_into_tensor(
                x_SBH, slice_SBH.contiguous(), group=ctx.group, async_op=True
            )
        for_slice = multiply_scatter(grad_SBV, weight, ctx.group) if for_slice_too else None
        for_weight = None
        if x_SBH is not None and arrives is not None:
            arrives.wait()
            for_weight = _for_weight(weight, grad_SBV, x_SBH, ctx.adds)
        for_bias = grad_SBV.reshape(-1, grad_SBV.size(-1)).sum(dim=0) if for_bias_too else None
        return for_slice, for_weight, for_bias, None, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_SBH: torch.Tensor, weight: torch.Tensor, group: ProcessGroup, adds: Adds | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x_SBH, weight)
        ctx.group, ctx.adds = group, adds
        return multiply_scatter(x_SBH, weight.t(), group)

    @staticmethod
    def backward(ctx: Any, slice_SBV: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_SBH, weight = ctx.saved_tensors
        for_weight_too = ctx.needs_input_grad[1]
        grad_SBV, for_x = gather_multiply(slice_SBV, weight, ctx.group, keeps=for_weight_too)
        for_weight = None if grad_SBV is None else _for_weight(weight, grad_SBV, x_SBH, ctx.adds)
        return for_x, for_weight, None, None


def _for_weight(
    weight: torch.Tensor, grad_SBV: torch.Tensor, x_SBH: torch.Tensor, adds: Adds | None
) -> torch.Tensor | None:
    """Return the gradient of the weight as autograd gets it, after the product that computes or adds it."""
    grad_NV, x_NH = (tensor.reshape(-1, tensor.size(-1)) for tensor in (grad_SBV, x_SBH))
    if adds is None:
        return grad_NV.t().matmul(x_NH)
    adds(grad_NV, x_NH)
    return replaces_gradient(weight)
