"""Computes causal attention over short sequences in fp32 on a CPU by products that keep the weights of the softmax.

torch's kernel computes the scores anew in its backward pass, in small products for each head. The weights of short
sequences are few enough to be kept, and a product for all heads at once reads heads where they lie.

Shapes: B batch, H query heads, G key/value heads, S positions, D channels of a query or key head, V of a value head;
N = B G groups of heads, R = S H / G queries of a group, one head after another.
"""

from typing import Any

import torch

from megatron_ext.parts.attention.describe import SHORT


def takes(query_BHSD: torch.Tensor, dropout: float) -> bool:
    """Return whether `attend_short` computes whole sequences of such queries."""
    on_cpu = query_BHSD.device.type == "cpu" and query_BHSD.dtype == torch.float32
    return on_cpu and query_BHSD.size(2) <= SHORT and dropout == 0.0


def attend_short(
    query_BHSD: torch.Tensor, key_BGSD: torch.Tensor, value_BGSV: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return softmax(scale Q K^T, causal) V, [B, H, S, V]. The heads may lie in any order."""
    if torch.compiler.is_compiling():  # which fuses the softmax with its scale and mask
        groups = _grouped(query_BHSD, key_BGSD), _grouped(key_BGSD, key_BGSD), _grouped(value_BGSV, key_BGSD)
        context = _scores(*groups[:2], scale).softmax(-1) @ groups[2]
        return context.reshape(*query_BHSD.shape[:3], -1)
    return _ShortAttention.apply(query_BHSD, key_BGSD, value_BGSV, scale)  # pyright: ignore[reportReturnType]


def _grouped(heads_BHSD: torch.Tensor, key_BGSD: torch.Tensor) -> torch.Tensor:
    """Return the heads as [N, R, D]."""
    return heads_BHSD.reshape(key_BGSD.size(0) * key_BGSD.size(1), -1, heads_BHSD.size(-1))


def _scores(query_NRD: torch.Tensor, key_NSD: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the scores, [N, R, S], with -infinity for keys that a query does not see."""
    length = key_NSD.size(1)
    hidden = torch.full((length, length), -torch.inf).triu_(1).repeat(query_NRD.size(1) // length, 1)
    return torch.baddbmm(hidden, query_NRD, key_NSD.transpose(1, 2), alpha=scale)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_BHSD: torch.Tensor, key_BGSD: torch.Tensor, value_BGSV: torch.Tensor, scale: float
    ) -> torch.Tensor:
        query, key, value = (_grouped(heads, key_BGSD) for heads in (query_BHSD, key_BGSD, value_BGSV))
        weights_NRS = _scores(query, key, scale)
        torch.softmax(weights_NRS, -1, out=weights_NRS)
        ctx.save_for_backward(query_BHSD, key_BGSD, value_BGSV, weights_NRS)
        ctx.scale = scale
        return torch.bmm(weights_NRS, value).view(*query_BHSD.shape[:3], -1)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_BHSV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        *heads, weights_NRS = ctx.saved_tensors
        query, key, value, grad = (_grouped(one, heads[1]) for one in (*heads, grad_BHSV))
        for_value = torch.bmm(weights_NRS.transpose(1, 2), grad)
        for_scores = torch.bmm(grad, value.transpose(1, 2))
        backward: Any = torch.ops.aten._softmax_backward_data.out
        backward(for_scores, weights_NRS, -1, torch.float32, grad_input=for_scores)
        # With a share of 0 of their first arguments: a product with a factor.
        for_query = torch.baddbmm(query, for_scores, key, beta=0, alpha=ctx.scale)
        for_key = torch.baddbmm(key, for_scores.transpose(1, 2), query, beta=0, alpha=ctx.scale)
        query_BHSD, key_BGSD, value_BGSV = heads
        return for_query.view(query_BHSD.shape), for_key.view(key_BGSD.shape), for_value.view(value_BGSV.shape), None
