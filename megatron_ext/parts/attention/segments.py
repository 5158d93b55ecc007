"""Causal attention over segments: consecutive queries that see consecutive keys, and no others.

A document in a packed sample is a segment; so is the part of a document, or of a whole sample, that one
context-parallel rank holds. No mask is made: a segment is at most a square causal block and a full block before it, and
attention over two blocks is put together from their log-sum-exps (Dao 2023, arXiv:2307.08691, section 3.1.1). Where the
device has a kernel for sequences of different lengths, documents of packed samples, and windows, are computed by it.

Shapes: B batch, H query heads, G key/value heads, Q queries, K keys, D channels of a query or key head, V channels of a
value head; s positions of a sample on this rank, S all of its positions (s = S without context parallelism).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_ext.data.packing import Documents, Segment
from megatron_ext.parts.attention import scores as scored
from megatron_ext.parts.attention.blocks import has_varlen_kernel, varlen_causal
from megatron_ext.parts.attention.describe import WINDOW_ROWS
from megatron_ext.parts.attention.scores import PLAIN, Places, Scores, sink_gradient, with_sink

_QUERIES_AT_ONCE = 512
"""Queries whose products with all keys are held at once, where these are only measured."""


def attend_segments(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKV: torch.Tensor,
    segments: Sequence[Segment],
    scale: float,
    window: int | None = None,
    scores: Scores = PLAIN,
) -> torch.Tensor:
    """Return attention of each segment's queries over its keys, [B, H, Q, V]; contiguous.

    Args:
        segments: cover every query once. The last query of a segment sees all keys of the segment, the one before it
            all but the last, and so on. Every row of the batch has the same segments.
        window: number of latest keys that a query sees; None: all.
        scores: how scores come of products, and the sink.
    """
    if not scores.are_plain and query_BHQD.device.type == "cuda":
        from megatron_ext.parts.attention.flex import attend_flex

        return attend_flex(query_BHQD, key_BGKD, value_BGKV, segments, scale, window, scores)
    return _Segments.apply(  # pyright: ignore[reportReturnType]
        query_BHQD, key_BGKD, value_BGKV, tuple(segments), scale, window, scores, scores.sink_H
    )


@torch.no_grad()
def largest_scores(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    segments: Sequence[Segment],
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Return the largest product of a query and a key that it sees, times `scale`, of each query head, fp32 [H].

    `attend_segments` has the same arguments. The products are computed once more, some queries at a time.
    """
    query_BGPQD = query_BHQD.detach().unflatten(1, (key_BGKD.size(1), -1))
    found = query_BHQD.new_full((query_BHQD.size(1),), -torch.inf, dtype=torch.float32)
    for rows, first, blocks in _parts(segments, window, query_BHQD):
        for start in range(rows.start, rows.stop, _QUERIES_AT_ONCE):
            some = slice(start, min(start + _QUERIES_AT_ONCE, rows.stop))
            own = first + torch.arange(some.start - rows.start, some.stop - rows.start, device=query_BHQD.device)
            keys = slice(blocks[0][0].start, first + some.stop - rows.start)
            places = torch.arange(keys.start, keys.stop, device=query_BHQD.device)
            seen = places <= own[:, None]
            if window is not None:
                seen &= places > own[:, None] - window
            products = query_BGPQD[:, :, :, some] @ key_BGKD.detach()[:, :, None, keys].mT
            largest = products.masked_fill(~seen, -torch.inf).amax(dim=(0, -2, -1)).flatten()
            found = torch.maximum(found, largest.float() * scale)
    return found


def merge(
    out: torch.Tensor, log_sum_exp: torch.Tensor, other: torch.Tensor, other_log_sum_exp: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention over the keys of two blocks, from the attention over each.

    Args:
        out, other: [..., Q, V]; the result has the wider of their types.
        log_sum_exp, other_log_sum_exp: [..., Q].
    """
    joint = torch.logaddexp(log_sum_exp, other_log_sum_exp)
    share = (log_sum_exp - joint).exp().unsqueeze(-1)
    other_share = (other_log_sum_exp - joint).exp().unsqueeze(-1)
    return out * share + other * other_share, joint


_Block = tuple[slice, bool, torch.Tensor | None]
"""Some keys, whether queries see them causally (as many keys as queries), and a mask."""


def _parts(
    segments: Sequence[Segment], window: int | None, like: torch.Tensor
) -> Iterator[tuple[slice, int, list[_Block]]]:
    """Yield a slice of queries, the key at the first query's own position, and the keys that the slice sees; a slice is
    a whole segment, or a few queries of it where a window hides some keys."""
    band = None
    for rows, queries, start, keys in ((one.rows, one.queries, one.first_key, one.keys) for one in segments):
        before, end = keys - queries, start + keys
        if window is None or keys <= window:
            whole: list[_Block] = [(slice(start, start + before), False, None)] if before else []
            yield rows, start + before, [*whole, (slice(start + before, end), True, None)]
            continue
        if band is None:
            band = _band(window, like)
        for first in range(0, queries, WINDOW_ROWS):
            some = min(WINDOW_ROWS, queries - first)
            seen = min(some + window - 1, before + first + some)
            last = start + before + first + some
            here = slice(rows.start + first, rows.start + first + some)
            yield here, last - some, [(slice(last - seen, last), False, band[-some:, -seen:])]


def _band(window: int, like: torch.Tensor) -> torch.Tensor:
    """Return the additive mask, [`WINDOW_ROWS`, `WINDOW_ROWS` + window - 1], that hides the keys after each query and
    before its window. It is made once: the last row sees the last key in every block."""
    seen = torch.ones(WINDOW_ROWS, WINDOW_ROWS + window - 1, dtype=torch.bool, device=like.device)
    hidden = ~seen.tril(window - 1).triu()
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, -torch.inf)


def _places(scores: Scores, first: int, rows: slice, keys: slice, like: torch.Tensor) -> Places | None:
    """Return the positions of queries, of which the first is at key `first`, and of keys, where scores depend on
    them."""
    if scores.slopes is None:
        return None
    queries = torch.arange(first, first + rows.stop - rows.start, device=like.device)
    return queries, torch.arange(keys.start, keys.stop, device=like.device)


class _Segments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        segments: tuple[Segment, ...],
        scale: float,
        window: int | None,
        scores: Scores,
        sink: torch.Tensor | float | None,
    ) -> torch.Tensor:
        out = query.new_empty((*query.shape[:-1], value.size(-1)))
        log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
        for rows, first, blocks in _parts(segments, window, query):
            parts = [
                scored.forward(
                    query[:, :, rows],
                    key[:, :, block],
                    value[:, :, block],
                    causal=causal,
                    scale=scale,
                    mask_QK=mask,
                    scores=scores,
                    places=_places(scores, first, rows, block, query),
                )
                for block, causal, mask in blocks
            ]
            joint = parts[0] if len(parts) == 1 else merge(*parts[0], *parts[1])
            out[:, :, rows], log_sum_exp[:, :, rows] = with_sink(*joint, sink)
        ctx.save_for_backward(query, key, value, out, log_sum_exp, sink if isinstance(sink, torch.Tensor) else None)
        ctx.segments, ctx.scale, ctx.window, ctx.scores = segments, scale, window, replace(scores, sink_H=None)
        return out

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, log_sum_exp, sink = ctx.saved_tensors
        for_query, for_key, for_value = (
            tensor.new_zeros(tensor.shape, dtype=log_sum_exp.dtype) for tensor in (query, key, value)
        )
        for rows, first, blocks in _parts(ctx.segments, ctx.window, query):
            for block, causal, mask in blocks:
                parts = scored.backward(
                    *(grad[:, :, rows], query[:, :, rows]),
                    *(key[:, :, block], value[:, :, block]),
                    *(out[:, :, rows], log_sum_exp[:, :, rows]),
                    causal=causal,
                    scale=ctx.scale,
                    mask_QK=mask,
                    scores=ctx.scores,
                    places=_places(ctx.scores, first, rows, block, query),
                )
                for_query[:, :, rows] += parts[0]
                for_key[:, :, block] += parts[1]
                for_value[:, :, block] += parts[2]
        for_sink = sink_gradient(grad, out, log_sum_exp, sink)
        return for_query.to(query.dtype), for_key.to(key.dtype), for_value.to(value.dtype), *[None] * 4, for_sink


def attend_documents(
    query_BHsD: torch.Tensor,
    key_BGSD: torch.Tensor,
    value_BGSV: torch.Tensor,
    documents: Documents,
    scale: float,
    window: int | None = None,
    scores: Scores = PLAIN,
) -> torch.Tensor:
    """Let every query attend to the keys of its own document up to its own position, to the latest `window` of them;
    return [B, H, s, V]."""
    if not (has_varlen_kernel(query_BHsD) and scores.are_plain):
        # Samples end to end: a sample's last position is followed by the next sample's first.
        query, key, value = (
            tensor.transpose(0, 1).flatten(1, 2)[None] for tensor in (query_BHsD, key_BGSD, value_BGSV)
        )
        out = attend_segments(query, key, value, documents.segments, scale, window, scores)
        return out[0].unflatten(1, (query_BHsD.size(0), -1)).transpose(0, 1)
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query_BHsD, key_BGSD, value_BGSV))
    if documents.key_index is not None:
        key, value = key.index_select(0, documents.key_index), value.index_select(0, documents.key_index)
    out = varlen_causal(query, key, value, documents.query_ends, documents.key_ends, documents.longest, scale, window)
    return out.unflatten(0, (query_BHsD.size(0), -1)).transpose(1, 2)


def attend_window(
    query_BHSD: torch.Tensor,
    key_BGSD: torch.Tensor,
    value_BGSV: torch.Tensor,
    scale: float,
    window: int | None,
    scores: Scores = PLAIN,
) -> torch.Tensor:
    """Let every query attend to the latest `window` keys up to its own position; return [B, H, S, V].

    No mask of S x S is made: a GPU's kernel for sequences of different lengths knows windows, and elsewhere queries are
    taken in blocks, so that time and memory grow with S times the window.
    """
    batch, _, length, _ = query_BHSD.shape
    if not (has_varlen_kernel(query_BHSD) and scores.are_plain):
        whole = (Segment(0, length, 0, length),)
        return attend_segments(query_BHSD, key_BGSD, value_BGSV, whole, scale, window, scores)
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query_BHSD, key_BGSD, value_BGSV))
    ends = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=query_BHSD.device)
    out = varlen_causal(query, key, value, ends, ends, (length, length), scale, window)
    return out.unflatten(0, (batch, -1)).transpose(1, 2)
