"""From samples to a microbatch, and the parts of it that a pipeline stage reads.

Shape legend: B = samples in a microbatch, S = tokens in a sample.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch


@dataclass(frozen=True)
class Batch:
    """One microbatch. A field is None where this pipeline stage does not read it."""

    tokens: torch.Tensor | None = None
    """int64 [B, S]; first stage."""
    position_ids: torch.Tensor | None = None
    """int64 [B, S]; first stage."""
    labels: torch.Tensor | None = None
    """int64 [B, S], the token after each of `tokens`; last stage."""
    loss_mask: torch.Tensor | None = None
    """float32 [B, S], 0 where the loss does not count; last stage."""

    def to(self, device: torch.device | str) -> "Batch":
        """The batch on a device; a pinned one is copied without waiting."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))

    def pin_memory(self) -> "Batch":
        """The batch in page-locked memory."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return Batch(**{name: None if tensor is None else function(tensor) for name, tensor in tensors.items()})


def collate(samples: Sequence[Mapping[str, Any]], *, is_first_stage: bool = True, is_last_stage: bool = True) -> Batch:
    """Stack samples, whose fields are tensors or arrays of [S], into what one stage reads."""

    def stack(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.stack([torch.as_tensor(sample[name]).to(dtype) for sample in samples])

    return Batch(
        tokens=stack("tokens", torch.int64) if is_first_stage else None,
        position_ids=stack("position_ids", torch.int64) if is_first_stage else None,
        labels=stack("labels", torch.int64) if is_last_stage else None,
        loss_mask=stack("loss_mask", torch.float32) if is_last_stage else None,
    )


def padding_sample(seq_length: int) -> dict[str, torch.Tensor]:
    """A sample that fills a place in a batch and that no loss counts: its loss mask is zero."""
    return {
        "tokens": torch.zeros(seq_length, dtype=torch.int64),
        "labels": torch.zeros(seq_length, dtype=torch.int64),
        "loss_mask": torch.zeros(seq_length, dtype=torch.float32),
        "position_ids": torch.arange(seq_length, dtype=torch.int64),
    }
