"""SwiGLU, silu(gate) * up (Shazeer 2020, arXiv:2002.05202), of a product's two halves, and its gradient.

A row may have a weight: the router's weight for its token. Only the product is kept for the backward pass, which
computes silu again.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_ext.device.triton.kernel_choice import launch

_BLOCK = 1024


def swiglu(gate_and_up: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(gate) * up, times its row's weight if there are any, [..., F].

    Args:
        gate_and_up: [..., 2 F]; the first half is the gate.
        weights: [...], of whatever precision.
    """
    return _SwiGLU.apply(gate_and_up, weights)  # pyright: ignore[reportReturnType]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        both = gate_and_up.contiguous()
        half = both.size(-1) // 2
        weights = None if weights is None else weights.contiguous()
        out = both.new_empty((*both.shape[:-1], half))
        launch(
            swiglu_forward,
            (both.numel() // (2 * half),),
            *(both, both if weights is None else weights, out, half),
            HAS_WEIGHTS=weights is not None,
            BLOCK=_BLOCK,
            num_warps=4,
        )
        ctx.save_for_backward(both, weights)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        both, weights = ctx.saved_tensors
        grad = grad.contiguous()
        made = torch.empty_like(both)
        for_weights = None if weights is None else torch.empty_like(weights)
        launch(
            swiglu_backward,
            (both.numel() // both.size(-1),),
            *(grad, both, both if weights is None else weights, made, made if for_weights is None else for_weights),
            grad.size(-1),
            HAS_WEIGHTS=weights is not None,
            BLOCK=_BLOCK,
            num_warps=4,
        )
        return made, for_weights


@triton.jit
def swiglu_forward(both, weights, out, half, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """Computes one row of all contiguous tensors."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, half, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < half
        gate = tl.load(both + row * 2 * half + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(both + row * 2 * half + half + column, mask=inside, other=0.0).to(tl.float32)
        result = gate / (1.0 + tl.exp(-gate)) * up
        if HAS_WEIGHTS:
            result *= tl.load(weights + row).to(tl.float32)
        tl.store(out + row * half + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(grad, both, weights, made, for_weights, half, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr):
    """Computes one row: d silu(g) / dg = s (1 + g (1 - s)) with s = sigmoid(g)."""
    row = tl.program_id(0).to(tl.int64)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, half, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < half
        gate = tl.load(both + row * 2 * half + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(both + row * 2 * half + half + column, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(grad + row * half + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        if HAS_WEIGHTS:
            products += given * silu * up
            given *= tl.load(weights + row).to(tl.float32)
        for_gate = given * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        tl.store(made + row * 2 * half + column, for_gate.to(made.dtype.element_ty), mask=inside)
        tl.store(made + row * 2 * half + half + column, (given * silu).to(made.dtype.element_ty), mask=inside)
    if HAS_WEIGHTS:
        tl.store(for_weights + row, tl.sum(products, axis=0).to(for_weights.dtype.element_ty))
