"""y = x A^T + b by the fastest library for the device.

torch multiplies fp32 matrices on a CPU with MKL, which on AMD processors does without AVX-512. oneDNN, which is in
torch as well, uses it, and is 2.2 times as fast there (docs/LOG.md); torch itself asks it for 16-bit types alone.
"""

from typing import Any

import torch
import torch.nn.functional as F

_HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: [..., in]; weight: [out, in]; bias: [out]. Returns [..., out], and differentiates as F.linear does."""
    if _HAS_ONEDNN and x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32:
        return _OneDNNLinear.apply(x, weight, bias)  # pyright: ignore[reportReturnType]
    return F.linear(x, weight, bias)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x A^T + b. Either matrix may be a transposed view; oneDNN reads it as it lies."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _OneDNNLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.size(-1))
        return (
            _product(grad, weight.t()) if for_x else None,
            _product(rows.t(), x.reshape(-1, x.size(-1)).t()) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )
