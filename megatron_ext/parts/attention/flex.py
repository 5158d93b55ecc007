"""Computes attention with other scores than products on a GPU, by torch's flex_attention, which compiles them into its
kernel (Dong et al. 2024, arXiv:2412.05496). No mask of queries x keys is held, only which blocks of 128 x 128 have any.

Shapes: B batch, H query heads, G key/value heads, Q queries, K keys, D channels of a query or key head, V of a value
head.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from megatron_ext.data.packing import Segment
from megatron_ext.parts.attention.scores import Scores, with_sink


def attend_flex(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKV: torch.Tensor,
    segments: Sequence[Segment],
    scale: float,
    window: int | None,
    scores: Scores,
    *,
    compiled: bool = True,
) -> torch.Tensor:
    """Compute `segments.attend_segments`.

    Args:
        compiled: whether torch.compile makes the kernel; otherwise all scores are written out, for a test.
    """
    device = query_BHQD.device
    first, own = (keys.to(device) for keys in _seen(segments, window))
    slopes = torch.zeros(()) if scores.slopes is None else torch.tensor(scores.slopes, device=device)

    def is_seen(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return (key >= first[query]) & (key <= own[query])

    def changed(score: Any, _batch: Any, head: Any, query: Any, key: Any) -> Any:
        if scores.cap is not None:
            score = scores.cap * torch.tanh(score / scores.cap)
        return score if scores.slopes is None else score + slopes[head] * (key - own[query])

    sizes = query_BHQD.size(2), key_BGKD.size(2)
    masks: Any
    attend: Any
    masks, attend = (
        map(_compiled, (create_block_mask, flex_attention)) if compiled else (create_block_mask, flex_attention)
    )
    out, rest = attend(
        query_BHQD,
        key_BGKD,
        value_BGKV,
        score_mod=changed,
        block_mask=masks(is_seen, None, None, *sizes, device=device),
        scale=scale,
        enable_gqa=query_BHQD.size(1) != key_BGKD.size(1),
        return_aux=AuxRequest(lse=True),
    )
    return with_sink(out, rest.lse, scores.sink_H)[0]


def _seen(segments: Sequence[Segment], window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first key that each query sees, and the last, which is its own."""
    own = [torch.arange(one.first_key + one.keys - one.queries, one.first_key + one.keys) for one in segments]
    reach = max(one.keys for one in segments) if window is None else window
    first = [(keys + 1 - reach).clamp(min=one.first_key) for keys, one in zip(own, segments, strict=True)]
    return torch.cat(first), torch.cat(own)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
