"""Splits the backward pass of linear layers: input gradients at once, for the stage that waits for them, and weight
gradients when there is time.

    split(True)                                 # before the first forward pass
    y = linear(x, weight)                       # layers ask `splits` and call this
    with kept_products() as products:
        torch.autograd.backward(y, gradient)    # gradients of inputs, of norms, of biases
    for _, product in products:
        product()                               # gradients of weights, one matrix after another

torch's own split (`torch.distributed.pipelining`, stage_backward_input and stage_backward_weight) asks autograd for one
half of the graph and then the other. An autograd function in Python computes both halves each time it is asked (as
megatron-core's linear layers do), and a recomputed layer adds all its gradients each time. Here the weight is no input
of the function: autograd does not wait for it, and the product goes to the weight's own node, with its hooks, when it
is made.

Shapes: N tokens, V rows of the weight (outputs), H columns (inputs); E experts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup

_splits = False
Products = list[tuple[torch.Tensor, Callable[[], None]]]
"""Weights, each with the function that computes its gradient."""

_kept: Products | None = None


def split(wanted: bool) -> None:
    """Have the layers of this process split their backward passes from now on, or not."""
    global _splits
    _splits = wanted


def splits(*weights: torch.Tensor) -> bool:
    """Return whether products with these weights are to be split: leaves of the graph that are trained."""
    return _splits and torch.is_grad_enabled() and all(one.is_leaf and one.requires_grad for one in weights)


@contextmanager
def kept_products() -> Iterator[Products]:
    """Return a context whose list takes the products of weights that are due in it."""
    global _kept
    before, _kept = _kept, []
    try:
        yield _kept
    finally:
        _kept = before


def due(weight: torch.Tensor, product: Callable[[], None]) -> None:
    """Make the gradient of a weight: at once, or where `kept_products` keeps it when that is asked for it."""
    if _kept is None:
        product()
    else:
        _kept.append((weight, product))


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gathers: ProcessGroup | None = None,
    sums: ProcessGroup | None = None,
    adds: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Return x A^T + b. x: [..., H].

    Args:
        gathers: the ranks over which the first dimension of x is gathered, and its gradient summed and divided.
        sums: the ranks over which the gradient of x is summed.
        adds: adds grad_NV^T x_NH to the weight's main gradient itself, given both; None: autograd adds it.
    """
    # In a tuple it is kept out of the graph.
    y: Any = _Linear.apply(x, (weight,), bias, gathers, sums, adds)
    return y


def _gathered(x: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    if group is None:
        return x
    whole = x.new_empty(x.size(0) * group.size(), *x.shape[1:])
    torch.distributed.all_gather_into_tensor(whole, x.contiguous(), group=group)
    return whole


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, of: Any, bias: Any, gathers: Any, sums: Any, adds: Any) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.of, ctx.has_bias, ctx.gathers, ctx.sums, ctx.adds = of, bias is not None, gathers, sums, adds
        return torch.nn.functional.linear(_gathered(x, gathers), of[0].detach(), bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        weight, gathers, adds = ctx.of[0], ctx.gathers, ctx.adds
        for_x = None
        if ctx.needs_input_grad[0]:
            for_x = grad.matmul(weight.detach())
            if gathers is not None:
                whole, for_x = for_x, torch.empty_like(x)
                torch.distributed.reduce_scatter_tensor(for_x, whole, group=gathers)
            if ctx.sums is not None:
                torch.distributed.all_reduce(for_x, group=ctx.sums)
        rows_NV = grad.reshape(-1, grad.size(-1))

        def product() -> None:
            x_NH = _gathered(x, gathers).reshape(-1, x.size(-1))
            if adds is None:
                weight.backward(rows_NV.t().matmul(x_NH))
            else:
                adds(rows_NV, x_NH)

        due(weight, product)
        return for_x, None, rows_NV.sum(0) if ctx.has_bias else None, None, None, None


def linear_by_expert(
    x_TI: torch.Tensor,
    weight_EOI: torch.Tensor,
    tokens: list[int],
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return rows of x times the transposed matrix of their expert, [T, O].

    Args:
        tokens: rows of each expert; x is sorted by it.
        multiply: multiplies sorted rows by the transposed matrix of their expert, [E, O, I].
    """
    y: Any = _Experts.apply(x_TI, (weight_EOI,), tokens, multiply)
    return y


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TI: torch.Tensor, of: Any, tokens: list[int], multiply: Any) -> torch.Tensor:
        ctx.save_for_backward(x_TI)
        ctx.of, ctx.tokens, ctx.multiply = of, tokens, multiply
        return multiply(x_TI, of[0].detach())

    @staticmethod
    def backward(ctx: Any, grad_TO: torch.Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x_TI,) = ctx.saved_tensors
        weight, tokens = ctx.of[0], ctx.tokens
        for_x = ctx.multiply(grad_TO.contiguous(), weight.detach().transpose(1, 2).contiguous())

        def product() -> None:
            pairs = zip(grad_TO.split(tokens), x_TI.split(tokens), strict=True)
            weight.backward(torch.stack([grad.t() @ x for grad, x in pairs]))

        due(weight, product)
        return for_x, None, None, None
