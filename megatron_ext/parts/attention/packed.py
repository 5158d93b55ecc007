"""Computes attention of packed samples, document by document, and in windows, without a mask: one kernel for all
documents where the device has one for sequences of different lengths, a kernel for each document elsewhere.

Shapes: B samples, H query heads, G key/value heads, D channels of a query or key head, V of a value head, s positions
of a sample on this rank, S all positions of a sample (s = S without context parallelism).
"""

import torch

from megatron_ext.data.packing import Documents, Segment
from megatron_ext.parts.attention.blocks import has_varlen_kernel, varlen_causal
from megatron_ext.parts.attention.scores import PLAIN, Scores
from megatron_ext.parts.attention.segments import attend_segments


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
