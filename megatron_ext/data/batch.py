"""From samples to a microbatch, and which parts of it a pipeline stage needs.

Shape legend: B = samples in a microbatch, S = tokens in a sample.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Batch = dict[str, torch.Tensor]
_DTYPES = {
    "tokens": torch.int64,
    "labels": torch.int64,
    "loss_mask": torch.float32,
    "position_ids": torch.int64,
}


def collate(samples: Sequence[Mapping[str, Any]]) -> Batch:
    """Stack samples of [S], tensors or arrays: tokens, labels, position_ids int64 [B, S], loss_mask float32 [B, S]."""
    return {
        name: torch.stack([torch.as_tensor(sample[name]).to(dtype) for sample in samples])
        for name, dtype in _DTYPES.items()
    }


def padding_sample(seq_length: int) -> dict[str, torch.Tensor]:
    """A sample that fills a place in a batch and that no loss counts: its loss mask is zero."""
    return {
        "tokens": torch.zeros(seq_length, dtype=torch.int64),
        "labels": torch.zeros(seq_length, dtype=torch.int64),
        "loss_mask": torch.zeros(seq_length, dtype=torch.float32),
        "position_ids": torch.arange(seq_length, dtype=torch.int64),
    }


def for_stage(batch: Batch, *, is_first: bool, is_last: bool) -> Batch:
    """What one pipeline stage reads: tokens and positions on the first, labels and loss mask on the last."""
    names = (("tokens", "position_ids") if is_first else ()) + (("labels", "loss_mask") if is_last else ())
    return {name: batch[name] for name in names}
