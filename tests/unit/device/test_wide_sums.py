"""Gradients of 16-bit weights that an embedding and LayerNorm add over tokens, on a CPU."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.device.wide_sums import embedding_with_wide_sums, layer_norm_with_wide_sums

TOKENS, CHANNELS = 5000, 24
IDS = torch.arange(TOKENS) % 3


def _looked_up(weight: torch.Tensor) -> torch.Tensor:
    return F.embedding(IDS, weight)


def _normed(*weights: torch.Tensor) -> torch.Tensor:
    x = torch.randint(-9, 10, (TOKENS, CHANNELS), generator=torch.Generator().manual_seed(0))  # exact in every type
    weight, bias = weights
    return F.layer_norm(x.to(weight.dtype), (CHANNELS,), weight, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("compute", "shapes"), [(_looked_up, [(4, CHANNELS)]), (_normed, [(CHANNELS,)] * 2)])
def test_gradients_over_thousands_of_tokens_are_rounded_once(
    dtype: torch.dtype, compute: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    """They are the ones of fp64 but for the rounding of the result; the forward pass has torch's bits."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.rand(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    in_fp64 = [weight.detach().double().requires_grad_() for weight in weights]
    grad = torch.rand(TOKENS, CHANNELS, generator=generator).to(dtype)
    result = compute(*weights)
    with torch.no_grad():
        assert torch.equal(result, compute(*weights))
    result.backward(grad)
    compute(*in_fp64).backward(grad.double())
    for weight, exact in zip(weights, in_fp64, strict=True):
        assert weight.grad is not None
        assert exact.grad is not None
        torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=torch.finfo(dtype).eps / 2, atol=1e-3)


def test_fp32_and_what_is_not_trained_are_left_to_torch() -> None:
    asked: list[torch.dtype] = []

    def original(_input: torch.Tensor, weight: torch.Tensor, *_settings: Any) -> torch.Tensor:
        asked.append(weight.dtype)
        return weight

    lookup = embedding_with_wide_sums(original)
    in_fp32, in_bf16 = (torch.ones(2, 2, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.bfloat16))
    lookup(IDS, in_fp32)
    lookup(IDS, in_bf16.detach())
    with torch.no_grad():
        lookup(IDS, in_bf16)
    lookup(IDS, in_bf16)
    assert asked == [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]
    norm: Any = layer_norm_with_wide_sums(cast(Any, lambda *given: given))
    assert norm(in_fp32, (2,), in_fp32)[0] is in_fp32
