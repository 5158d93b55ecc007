"""Adds the gradients of 16-bit weights over tokens in fp32 on a CPU, and rounds the sum once.

A token that occurs 5,000 times adds 5,000 gradients to one row of the embedding. torch's CPU kernels for the gradients
of an embedding and of LayerNorm's weights keep that sum in the weight's type: in bf16, adding 1 to 256 is 256, in fp16
2048. Its other operations over tokens (products, convolutions, sums along a dimension) add in fp32 on a CPU, too, and a
GPU does in all of them. Gradients of fp32 weights have torch's own bits.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

Operation = Callable[..., torch.Tensor]
"""An operation of torch.nn.functional."""


def _adds_in_16_bits(values: torch.Tensor, *weights: torch.Tensor | None) -> bool:
    """Return whether torch would add the gradients of these weights in the type of `values`, and that has 16 bits.
    Compiled code does not."""
    is_narrow = values.dtype.itemsize == 2 and values.device.type == "cpu"
    if not is_narrow or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    return any(weight is not None and weight.requires_grad for weight in weights)


def embedding_with_wide_sums(original: Operation) -> Operation:
    """Return torch's embedding with gradients that are added in fp32: it looks the rows up in an fp32 copy."""

    @functools.wraps(original)
    def embedding(input: torch.Tensor, weight: torch.Tensor, *settings: Any, **named: Any) -> torch.Tensor:
        if not _adds_in_16_bits(weight, weight):
            return original(input, weight, *settings, **named)
        return original(input, weight.float(), *settings, **named).to(weight.dtype)

    return embedding


def layer_norm_with_wide_sums(original: Operation) -> Operation:
    """Return torch's LayerNorm, whose forward pass has its bits, with gradients that are computed in fp32."""

    @functools.wraps(original)
    def layer_norm(
        input: torch.Tensor,
        normalized_shape: Any,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
    ) -> torch.Tensor:
        if _adds_in_16_bits(input, weight, bias):
            return _LayerNorm.apply(input, normalized_shape, weight, bias, eps)  # pyright: ignore[reportReturnType]
        return original(input, normalized_shape, weight, bias, eps)

    return layer_norm


class _LayerNorm(torch.autograd.Function):
    """Keeps the 16-bit input, as torch does, and its mean and deviation in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, shape: Any, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        normed, mean, inverse = torch.native_layer_norm(x, shape, _wide(weight), _wide(bias), eps)
        ctx.save_for_backward(x, mean, inverse, weight, bias)
        ctx.shape = shape
        return normed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, mean, inverse, weight, bias = ctx.saved_tensors
        for_x, _, for_weight, for_bias, _ = ctx.needs_input_grad
        gradients = torch.ops.aten.native_layer_norm_backward(
            *(grad.float(), x.float(), ctx.shape, mean, inverse, _wide(weight), _wide(bias)),
            [for_x, for_weight, for_bias],
        )
        for_x, for_weight, for_bias = (
            None if one is None else one.to(given.dtype)
            for one, given in zip(gradients, (x, weight, bias), strict=True)
        )
        return for_x, None, for_weight, for_bias, None


def _wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()
