"""Computes attention of context-parallel ranks, which each hold two chunks of every sample
(`config.derived.rank_order.context_chunks`).

There are three ways to see the keys of the others, with equal results (`--cp-comm-type`):

- all_gather: every rank gathers all keys and values and attends with its own queries (Llama 3, arXiv:2407.21783,
  section 3.3.2). Their gradients are reduce-scattered.
- p2p: keys and values travel around a ring of ranks, one step behind another, while each rank attends to those at
  hand; results are put together by log-sum-exp (Ring Attention, Liu et al. 2023, arXiv:2310.01889).
- a2a: an exchange gives every rank all positions of some heads, then another the heads back (DeepSpeed Ulysses, Jacobs
  et al. 2023, arXiv:2309.14509).

Keys and values may differ in size; they travel as one message, one after the other in one flat buffer.

Shapes: B batch, H query heads, G key/value heads, D channels of a query or key head, V of a value head; S positions of
a sample, s = S / ranks positions of this rank, chunk after chunk.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import all_to_all, gather_from_sequence_parallel_region
from torch.distributed import P2POp, ProcessGroup, batch_isend_irecv, irecv, isend

from megatron_ext.config.derived.rank_order import context_chunks
from megatron_ext.data.packing import Segment
from megatron_ext.parts.attention import scores as scored
from megatron_ext.parts.attention.scores import PLAIN, Places, Scores, sink_gradient, with_sink
from megatron_ext.parts.attention.segments import attend_segments, merge

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def all_positions(
    key_BGsD: torch.Tensor, value_BGsV: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys [B, G, S, D] and values [B, G, S, V] of all ranks in the order of the positions, by one
    all-gather."""
    parts = gather_from_sequence_parallel_region(_joined(key_BGsD, value_BGsV).unsqueeze(0), group=group)
    assert isinstance(parts, torch.Tensor)
    key, value = (_in_order(part) for part in _parted(parts, (key_BGsD.shape, value_BGsV.shape)))
    return key, value


def segments_of_rank(rank: int, size: int, length: int) -> tuple[Segment, Segment]:
    """Return the segments of a rank's two chunks in one sample of `length` positions: queries of a chunk see everything
    up to the chunk's end."""
    chunk = length // (2 * size)
    head, tail = context_chunks(rank, size)
    return Segment(0, chunk, 0, (head + 1) * chunk), Segment(chunk, chunk, 0, (tail + 1) * chunk)


def attend_gathered(
    query_BHsD: torch.Tensor,
    key_BGsD: torch.Tensor,
    value_BGsV: torch.Tensor,
    group: ProcessGroup,
    scale: float,
    window: int | None = None,
    scores: Scores = PLAIN,
) -> torch.Tensor:
    """Return attention of this rank's queries, [B, H, s, V], over gathered keys: the latest `window` of them."""
    key, value = all_positions(key_BGsD, value_BGsV, group)
    segments = segments_of_rank(group.rank(), group.size(), key.size(2))
    return attend_segments(query_BHsD, key, value, segments, scale, window, scores)


def attend_by_heads(
    query_BHsD: torch.Tensor, key_BGsD: torch.Tensor, value_BGsV: torch.Tensor, group: ProcessGroup, attend: Attention
) -> torch.Tensor:
    """Call `attend` on all positions of H / ranks query and G / ranks key heads; return [B, H, s, V].

    Args:
        attend: takes query and key [B, heads, S, D] and value [B, heads, S, V]; returns [B, query's heads, S, V].
    """
    size = group.size()
    # Rank r gets the r-th part of every tensor's heads: the groups of its queries are then on it as well.
    by_rank = [tensor.unflatten(1, (size, -1)).movedim(1, 0) for tensor in (query_BHsD, key_BGsD, value_BGsV)]
    parts = all_to_all(group, torch.cat([tensor.flatten(1) for tensor in by_rank], dim=1))
    assert isinstance(parts, torch.Tensor)
    query, key, value = (_in_order(part) for part in _parted(parts, [tensor.shape[1:] for tensor in by_rank]))
    out_BhSV = attend(query, key, value)
    parts = all_to_all(group, _in_chunks(out_BhSV, size))
    assert isinstance(parts, torch.Tensor)
    return parts.movedim(0, 1).flatten(1, 2)


def attend_ring(
    query_BHsD: torch.Tensor,
    key_BGsD: torch.Tensor,
    value_BGsV: torch.Tensor,
    group: ProcessGroup,
    scale: float,
    scores: Scores = PLAIN,
) -> torch.Tensor:
    """Return attention of this rank's queries, [B, H, s, V], over keys that come around the ring."""
    return _Ring.apply(query_BHsD, key_BGsD, value_BGsV, group, scale, scores, scores.sink_H)  # pyright: ignore[reportReturnType]


def _joined(*tensors: torch.Tensor) -> torch.Tensor:
    """Return all elements of the tensors in one dimension, one tensor after the other."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def _parted(joined: torch.Tensor, shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Return [..., elements] as views [..., *shape], the inverse of `_joined` in the last dimension."""
    parts = joined.split([math.prod(shape) for shape in shapes], dim=-1)
    return [part.unflatten(-1, shape) for part, shape in zip(parts, shapes, strict=True)]


def _in_order(parts: torch.Tensor) -> torch.Tensor:
    """Return [ranks, ..., s, D], each rank's two chunks, as [..., S, D] in the order of the positions."""
    size = len(parts)
    chunks = parts.unflatten(-2, (2, -1))
    held = [chunk for rank in range(size) for chunk in context_chunks(rank, size)]
    flat = [chunks[index // 2, ..., index % 2, :, :] for index in range(2 * size)]
    return torch.cat([flat[held.index(chunk)] for chunk in range(2 * size)], dim=-2)


def _in_chunks(whole: torch.Tensor, size: int) -> torch.Tensor:
    """Return [..., S, D] as [ranks, ..., s, D]: the inverse of `_in_order`."""
    chunks = whole.chunk(2 * size, dim=-2)
    return torch.stack([torch.cat([chunks[i] for i in context_chunks(rank, size)], dim=-2) for rank in range(size)])


def _neighbours(rank: int, size: int) -> tuple[int, int]:
    """Return the rank that a rank of the ring sends to, and the rank that it receives from."""
    return (rank + 1) % size, (rank - 1) % size


def _visible(rank: int, source: int, length: int) -> tuple[slice, slice, bool]:
    """Return which of a rank's `length` queries see which keys of `source`, and whether causally or in full.

    Both ranks hold a chunk of the head and one of the tail, so the same two of their four pairs of chunks are always
    full: half of the square, in one block.
    """
    half = length // 2
    everything = slice(0, length)
    if source == rank:
        return everything, everything, True
    return (everything, slice(0, half), False) if source < rank else (slice(half, length), everything, False)


def _places(
    scores: Scores, group: ProcessGroup, source: int, rows: slice, columns: slice, query: torch.Tensor
) -> Places | None:
    """Return the positions in the sample of some of this rank's queries, and of some keys of `source`, if scores depend
    on them."""
    if scores.slopes is None:
        return None
    half = query.size(2) // 2
    offsets = torch.arange(half, device=query.device)

    def of(rank: int) -> torch.Tensor:
        return torch.cat([offsets + half * chunk for chunk in context_chunks(rank, group.size())])

    return of(group.rank())[rows], of(source)[columns]


class _Exchange:
    """Sends a tensor to the next rank of the ring, and receives another from the one before."""

    def __init__(self, tensor: torch.Tensor, group: ProcessGroup, tag: int):
        after, before = _neighbours(group.rank(), group.size())
        self._received = tensor.new_empty(tensor.shape)
        self._sent = tensor  # kept until it has left
        self._works = batch_isend_irecv(
            [
                P2POp(isend, tensor, group=group, group_peer=after, tag=tag),
                P2POp(irecv, self._received, group=group, group_peer=before, tag=tag),
            ]
        )

    def wait(self) -> torch.Tensor:
        for work in self._works:
            work.wait()
        return self._received


class _Ring(torch.autograd.Function):
    """Attention around the ring. Backward the keys travel again, and the sums of their gradients one step behind them,
    until they are home."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: ProcessGroup,
        scale: float,
        scores: Scores,
        sink: torch.Tensor | float | None,
    ) -> torch.Tensor:
        rank, size, accurate = group.rank(), group.size(), torch.promote_types(query.dtype, torch.float32)
        shapes = key.shape, value.shape
        pair = _joined(key, value)
        out = log_sum_exp = None
        for step in range(size):
            exchange = _Exchange(pair, group, step) if step < size - 1 else None
            source = (rank - step) % size
            rows, columns, causal = _visible(rank, source, query.size(2))
            keys, values = _parted(pair, shapes)
            part, part_log_sum_exp = scored.forward(
                query[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                causal=causal,
                scale=scale,
                scores=scores,
                places=_places(scores, group, source, rows, columns, query),
            )
            if out is None or log_sum_exp is None:  # the first block is this rank's own, with all of its queries
                out, log_sum_exp = part.to(accurate), part_log_sum_exp.clone()
            else:
                out[:, :, rows], log_sum_exp[:, :, rows] = merge(
                    out[:, :, rows], log_sum_exp[:, :, rows], part, part_log_sum_exp
                )
            pair = exchange.wait() if exchange else pair
        assert out is not None
        assert log_sum_exp is not None
        out, log_sum_exp = with_sink(out, log_sum_exp, sink)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, log_sum_exp, sink if isinstance(sink, torch.Tensor) else None)
        ctx.group, ctx.scale, ctx.scores = group, scale, replace(scores, sink_H=None)
        return out

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, log_sum_exp, sink = ctx.saved_tensors
        rank, size = ctx.group.rank(), ctx.group.size()
        shapes = key.shape, value.shape
        pair = _joined(key, value)
        for_query = query.new_zeros(query.shape, dtype=log_sum_exp.dtype)
        home = None
        for step in range(size):
            exchange = _Exchange(pair, ctx.group, 2 * step) if step < size - 1 else None
            source = (rank - step) % size
            rows, columns, causal = _visible(rank, source, query.size(2))
            keys, values = _parted(pair, shapes)
            parts = scored.backward(
                grad[:, :, rows],
                query[:, :, rows],
                keys[:, :, columns],
                values[:, :, columns],
                out[:, :, rows],
                log_sum_exp[:, :, rows],
                causal=causal,
                scale=ctx.scale,
                scores=ctx.scores,
                places=_places(ctx.scores, ctx.group, source, rows, columns, query),
            )
            for_query[:, :, rows] += parts[0]
            for_pair = home.wait() if home else pair.new_zeros(pair.shape, dtype=log_sum_exp.dtype)
            for_keys, for_values = _parted(for_pair, shapes)
            for_keys[:, :, columns] += parts[1]
            for_values[:, :, columns] += parts[2]
            home = _Exchange(for_pair, ctx.group, 2 * step + 1)
            pair = exchange.wait() if exchange else pair
        assert home is not None
        for_key, for_value = _parted(home.wait().to(key.dtype), shapes)
        for_sink = sink_gradient(grad, out, log_sum_exp, sink)
        return for_query.to(query.dtype), for_key, for_value, *[None] * 3, for_sink
