"""Attention to segments, written out with one mask over all queries and keys."""

from collections.abc import Sequence

import torch

from megatron_ext.data.packing import Segment
from megatron_ext.parts.attention.scores import PLAIN, Scores


def attend_segments_reference(
    query_BHQD: torch.Tensor,
    key_BGKD: torch.Tensor,
    value_BGKV: torch.Tensor,
    segments: Sequence[Segment],
    scale: float,
    window: int | None = None,
    scores: Scores = PLAIN,
) -> torch.Tensor:
    """Compute `attend_segments` written out with one mask over all queries and keys."""
    queries, keys = query_BHQD.size(2), key_BGKD.size(2)
    visible = torch.zeros(queries, keys, dtype=torch.bool)
    distance = torch.zeros(queries, keys, dtype=query_BHQD.dtype)
    for segment in segments:
        rows, columns = segment.rows, slice(segment.first_key, segment.first_key + segment.keys)
        last = segment.keys - segment.queries  # key that the first query sees
        seen = torch.ones(segment.queries, segment.keys, dtype=torch.bool).tril(last)
        visible[rows, columns] = seen if window is None else seen.triu(last - window + 1)
        distance[rows, columns] = torch.arange(segment.keys) - torch.arange(last, segment.keys)[:, None].to(distance)
    repeats = query_BHQD.size(1) // key_BGKD.size(1)
    key, value = key_BGKD.repeat_interleave(repeats, 1), value_BGKV.repeat_interleave(repeats, 1)
    logits = query_BHQD @ key.transpose(-1, -2) * scale
    if scores.cap is not None:
        logits = scores.cap * (logits / scores.cap).tanh()
    if scores.slopes is not None:
        logits = logits + torch.tensor(scores.slopes).to(logits)[:, None, None] * distance
    logits = logits.masked_fill(~visible, -torch.inf)
    if scores.sink_H is None:
        return logits.softmax(-1) @ value
    sink = torch.as_tensor(scores.sink_H).to(logits).reshape(-1, 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat((logits, sink), -1).softmax(-1)[..., :-1] @ value
