"""Computes causal attention over few keys in fp32 on a CPU by products that keep the weights of the softmax.

torch's kernel computes the scores anew in its backward pass, in small products for each head. Where queries see few
keys the weights are few enough to be kept, and a product for all heads at once reads heads where they lie. Queries are
taken in blocks of `KEPT_ROWS`, each with the keys that some query of the block sees: half of a long square of scores,
and what lies outside of a window, is never computed.

Shapes: B batch, H query heads, G key/value heads, S positions, D channels of a query or key head, V of a value head;
N = B G groups of heads, P queries of a block, R = P H / G of a group, one head after another, K keys of a block.
"""

from collections.abc import Iterator
from typing import Any

import torch

from megatron_ext.parts.attention.describe import KEPT_ROWS, has_few_keys


def takes(query_BHSD: torch.Tensor, dropout: float, window: int | None = None) -> bool:
    """Return whether `attend_short` computes whole sequences of such queries."""
    on_cpu = query_BHSD.device.type == "cpu" and query_BHSD.dtype == torch.float32
    return on_cpu and has_few_keys(query_BHSD.size(2), window) and dropout == 0.0


def attend_short(
    query_BHSD: torch.Tensor,
    key_BGSD: torch.Tensor,
    value_BGSV: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Return softmax(scale Q K^T, causal) V, [B, H, S, V]. The heads may lie in any order.

    Args:
        window: number of latest keys that a query sees; None: all.
    """
    heads = query_BHSD, key_BGSD, value_BGSV
    if torch.compiler.is_compiling():  # which fuses the softmax with its scale and mask
        blocks = [_compiled_block(*heads, scale, window, *places) for places in _blocks(query_BHSD.size(2), window)]
        return _joined(blocks)
    return _ShortAttention.apply(*heads, scale, window)  # pyright: ignore[reportReturnType]


def _blocks(length: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of each block, and the keys that some of them see."""
    for first in range(0, length, KEPT_ROWS):
        last = min(first + KEPT_ROWS, length)
        yield slice(first, last), slice(0 if window is None else max(0, first + 1 - window), last)


def _compiled_block(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int | None,
    rows: slice,
    keys: slice,
) -> torch.Tensor:
    groups = _grouped(query[:, :, rows], key), _grouped(key[:, :, keys], key), _grouped(value[:, :, keys], key)
    context_NRV = _scores(*groups[:2], scale, window, rows, keys).softmax(-1) @ groups[2]
    return context_NRV.reshape(*query.shape[:2], rows.stop - rows.start, -1)


def _joined(blocks: list[torch.Tensor]) -> torch.Tensor:
    """Return the results of blocks of queries, [B, H, P, channels] each, as one tensor."""
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 2)


def _grouped(heads_BHSD: torch.Tensor, key_BGSD: torch.Tensor) -> torch.Tensor:
    """Return the heads as [N, R, D]."""
    return heads_BHSD.reshape(key_BGSD.size(0) * key_BGSD.size(1), -1, heads_BHSD.size(-1))


def _scores(
    query_NRD: torch.Tensor, key_NKD: torch.Tensor, scale: float, window: int | None, rows: slice, keys: slice
) -> torch.Tensor:
    """Return the scores, [N, R, K], with -infinity for keys that a query does not see."""
    queries, ahead = rows.stop - rows.start, rows.start - keys.start
    hidden = torch.full((queries, keys.stop - keys.start), -torch.inf)
    seen_late = hidden.triu(ahead + 1)
    if window is not None:
        seen_late += hidden.tril(ahead - window)
    mask_RK = seen_late.repeat(query_NRD.size(1) // queries, 1)
    return torch.baddbmm(mask_RK, query_NRD, key_NKD.transpose(1, 2), alpha=scale)


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_BHSD: torch.Tensor,
        key_BGSD: torch.Tensor,
        value_BGSV: torch.Tensor,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        kept, contexts = [], []
        for rows, keys in _blocks(query_BHSD.size(2), window):
            query = query_BHSD[:, :, rows]
            key, value = (_grouped(heads[:, :, keys], key_BGSD) for heads in (key_BGSD, value_BGSV))
            weights_NRK = _scores(_grouped(query, key_BGSD), key, scale, window, rows, keys)
            torch.softmax(weights_NRK, -1, out=weights_NRK)
            kept.append(weights_NRK)
            contexts.append(torch.bmm(weights_NRK, value).view(*query.shape[:3], -1))
        ctx.save_for_backward(query_BHSD, key_BGSD, value_BGSV, *kept)
        ctx.scale, ctx.window = scale, window
        return _joined(contexts)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_BHSV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        query_BHSD, key_BGSD, value_BGSV, *kept = ctx.saved_tensors
        key, value = _grouped(key_BGSD, key_BGSD), _grouped(value_BGSV, key_BGSD)
        for_query, for_key, for_value = [], torch.zeros_like(key), torch.zeros_like(value)
        softmax_backward: Any = torch.ops.aten._softmax_backward_data.out
        for weights_NRK, (rows, keys) in zip(kept, _blocks(query_BHSD.size(2), ctx.window), strict=True):
            query, grad = (_grouped(heads[:, :, rows], key_BGSD) for heads in (query_BHSD, grad_BHSV))
            for_value[:, keys].baddbmm_(weights_NRK.transpose(1, 2), grad)
            for_scores = torch.bmm(grad, value[:, keys].transpose(1, 2))
            softmax_backward(for_scores, weights_NRK, -1, torch.float32, grad_input=for_scores)
            # With a share of 0 of their first argument: a product with a factor.
            of_rows = torch.baddbmm(query, for_scores, key[:, keys], beta=0, alpha=ctx.scale)
            for_query.append(of_rows.view(*query_BHSD.shape[:2], -1, of_rows.size(-1)))
            for_key[:, keys].baddbmm_(for_scores.transpose(1, 2), query, alpha=ctx.scale)
        return _joined(for_query), for_key.view(key_BGSD.shape), for_value.view(value_BGSV.shape), None, None
