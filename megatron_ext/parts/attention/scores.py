"""Computes attention whose scores are more than products of queries and keys: capped, with ALiBi's slopes, with a sink.

A bound and slopes change the scores themselves. Kernels take slopes as a mask of each head, and know no bound, which is
written out; either is computed for a few queries at a time, so that memory grows with the keys, and not with their
square. A sink is one more key of every query, with the value 0. It changes no score, so that it joins at the end, by
the log-sum-exp of all keys, whichever kernel computed them in whatever blocks: the context is multiplied by
sigmoid(log-sum-exp - sink). The gradients of queries, keys and values are then those that each block gives of the
joint result (`blocks.block_backward`).

Shapes: B batch, H query heads, G key/value heads, Q queries, K keys, D channels of a query or key head, V of a value
head.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from megatron_ext.parts.attention.blocks import block_backward, block_forward
from megatron_ext.parts.attention.describe import WINDOW_ROWS

Places = tuple[torch.Tensor, torch.Tensor]
"""Positions of the queries, int64 [Q], and of the keys, [K]."""


@dataclass(frozen=True)
class Scores:
    """Changes to the scores, scale Q K^T, before the softmax, and one more term of its sum, for the heads of one
    rank."""

    cap: float | None = None
    """Bound of the scores, as cap tanh(scores / cap)."""

    slopes: tuple[float, ...] | None = None
    """Slopes, which the scores of each head lose for every position from query to key (ALiBi, arXiv:2108.12409)."""

    sink_H: torch.Tensor | float | None = None
    """Score of one more key, which every query sees, and whose value is 0: of each head, or the same for all."""

    @property
    def are_plain(self) -> bool:
        """Whether the scores are products alone, without cap, slopes or sink."""
        return self.cap is None and self.slopes is None and self.sink_H is None

    def of_heads(self, rank: int, size: int) -> "Scores":
        """Return the `Scores` of the heads that rank `rank` of `size` has."""
        slopes = self.slopes and self.slopes[rank * len(self.slopes) // size : (rank + 1) * len(self.slopes) // size]
        sink = self.sink_H.chunk(size)[rank] if isinstance(self.sink_H, torch.Tensor) else self.sink_H
        return replace(self, slopes=slopes, sink_H=sink)


PLAIN = Scores()


@functools.lru_cache(maxsize=1)  # all layers keep the same one for their backward passes
def causal_slopes(slopes: tuple[float, ...], length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the bias that slopes add to the scores of each head, and -inf where a query does not see a key, [1, H, Q,
    K]: for kernels with dropout, which attention in blocks does not have."""
    places = torch.arange(length, device=device)
    distance_QK = (places - places[:, None]).to(torch.promote_types(dtype, torch.float32))
    lost_HQK = distance_QK.new_tensor(slopes)[:, None, None] * distance_QK
    return lost_HQK.masked_fill(distance_QK > 0, -torch.inf).to(dtype)[None]


def forward(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKV: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    mask_QK: torch.Tensor | None = None,
    scores: Scores = PLAIN,
    places: Places | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `blocks.block_forward` with such scores, without the sink.

    Args:
        places: where queries and keys stand, which slopes need.
    """
    heads = query_BHQD, key_BGKD, value_BGKV
    if scores.cap is None and scores.slopes is None:
        return block_forward(*heads, causal=causal, scale=scale, mask_QK=mask_QK)
    parts = []
    for rows, keys, mask in _by_rows(*heads[:2], causal, mask_QK, scores, places):
        some = query_BHQD[:, :, rows], key_BGKD[:, :, keys], value_BGKV[:, :, keys]
        parts.append(block_forward(*some, causal=False, scale=scale, mask_QK=mask, cap=scores.cap))
    out, log_sum_exp = (torch.cat(tensors, 2) for tensors in zip(*parts, strict=True))
    return out, log_sum_exp


def backward(
    grad_BHQV: torch.Tensor,
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKV: torch.Tensor,
    out_BHQV: torch.Tensor,
    log_sum_exp_BHQ: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    mask_QK: torch.Tensor | None = None,
    scores: Scores = PLAIN,
    places: Places | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute `blocks.block_backward` with such scores: this block's share of the gradients of query, key and value.
    `out` and `log_sum_exp` are those over all keys and the sink."""
    heads = query_BHQD, key_BGKD, value_BGKV
    if scores.cap is None and scores.slopes is None:
        joint = out_BHQV, log_sum_exp_BHQ.contiguous()
        return block_backward(grad_BHQV, *heads, *joint, causal=causal, scale=scale, mask_QK=mask_QK)
    sums = [tensor.new_zeros(tensor.shape, dtype=log_sum_exp_BHQ.dtype) for tensor in heads]
    for rows, keys, mask in _by_rows(*heads[:2], causal, mask_QK, scores, places):
        parts = block_backward(
            grad_BHQV[:, :, rows],
            query_BHQD[:, :, rows],
            key_BGKD[:, :, keys],
            value_BGKV[:, :, keys],
            out_BHQV[:, :, rows],
            log_sum_exp_BHQ[:, :, rows].contiguous(),
            causal=False,
            scale=scale,
            mask_QK=mask,
            cap=scores.cap,
        )
        for total, where, part in zip(sums, (rows, keys, keys), parts, strict=True):
            total[:, :, where] += part
    return tuple(total.to(like.dtype) for total, like in zip(sums, heads, strict=True))


def with_sink(
    out_BHQV: torch.Tensor, log_sum_exp_BHQ: torch.Tensor, sink_H: torch.Tensor | float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return context and log-sum-exp over all keys and the sink, from the context and log-sum-exp over all keys."""
    if sink_H is None:
        return out_BHQV, log_sum_exp_BHQ
    is_learned = isinstance(sink_H, torch.Tensor)
    sink = sink_H.to(log_sum_exp_BHQ.dtype)[:, None] if is_learned else torch.full_like(log_sum_exp_BHQ, sink_H)
    joint = torch.logaddexp(log_sum_exp_BHQ, sink)
    return (out_BHQV * (log_sum_exp_BHQ - joint).exp().unsqueeze(-1)).to(out_BHQV.dtype), joint


def sink_gradient(
    grad_BHQV: torch.Tensor, out_BHQV: torch.Tensor, log_sum_exp_BHQ: torch.Tensor, sink_H: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the gradient of a sink that is learned, [H], from the results of `with_sink`."""
    if sink_H is None:
        return None
    accurate = log_sum_exp_BHQ.dtype
    weight_BHQ = (sink_H.to(accurate)[:, None] - log_sum_exp_BHQ).exp()
    shift_BHQ = (grad_BHQV.to(accurate) * out_BHQV.to(accurate)).sum(-1)
    return -(weight_BHQ * shift_BHQ).sum((0, 2)).to(sink_H.dtype)


def _by_rows(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    causal: bool,
    mask_QK: torch.Tensor | None,
    scores: Scores,
    places: Places | None,
) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
    """Yield a few queries at a time, the keys that they may see, and the additive mask of their scores."""
    queries, device = query_BHQD.size(2), query_BHQD.device
    accurate = torch.promote_types(query_BHQD.dtype, torch.float32)
    for first in range(0, queries, WINDOW_ROWS):
        last = min(first + WINDOW_ROWS, queries)
        seen = last if causal else key_BGKD.size(2)
        mask = None if mask_QK is None else mask_QK[..., first:last, :seen].to(accurate)
        if causal:
            hidden = torch.ones(last - first, seen, dtype=torch.bool, device=device).triu(first + 1)
            mask = torch.zeros(hidden.shape, dtype=accurate, device=device).masked_fill_(hidden, -torch.inf)
        if scores.slopes is not None:
            assert places is not None, "slopes are of positions"
            slopes_H11 = torch.tensor(scores.slopes, dtype=accurate, device=device)[:, None, None]
            lost = (slopes_H11 * (places[1][:seen] - places[0][first:last, None]))[None]
            mask = lost if mask is None else lost + mask
        yield slice(first, last), slice(0, seen), mask
