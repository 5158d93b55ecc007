"""From samples to a microbatch, and the parts of it that a pipeline stage reads.

Shape legend: B = samples in a microbatch, S = tokens in a sample (of those that a context-parallel rank holds, once
they are divided), N = depths of multi-token prediction.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_ext.data.packing import (
    Documents,
    begins_after_eod,
    document_starts,
    documents_of,
    held_positions,
    restarted_positions,
)


class Ahead(NamedTuple):
    """Inputs and targets of multi-token prediction: depth k, from 1, predicts the token k + 1 positions ahead."""

    tokens: torch.Tensor
    """int64 [B, S, N], the token k positions ahead; 0 where the sample ends before."""
    labels: torch.Tensor
    """int64 [B, S, N], the token to predict."""
    weights: torch.Tensor
    """float32 [B, S, N], 0 where the loss of a depth does not count."""


@dataclass(frozen=True)
class Batch:
    """One microbatch. A field is None where this pipeline stage does not read it."""

    tokens: torch.Tensor | None = None
    """int64 [B, S]; first stage."""
    position_ids: torch.Tensor | None = None
    """int64 [B, S]; first stage, and every stage where they restart with each document."""
    labels: torch.Tensor | None = None
    """int64 [B, S], the token after each of `tokens`; last stage."""
    loss_mask: torch.Tensor | None = None
    """float32 [B, S], 0 where the loss does not count; last stage."""
    documents: Documents | None = None
    """The documents, which decide which positions attend to which; None where documents are not kept apart; every
    stage."""
    ahead: Ahead | None = None
    """Last stage, where several tokens are predicted."""

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch on a device; a pinned one is copied without waiting."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))

    def pin_memory(self) -> "Batch":
        """Return the batch in page-locked memory."""
        return self.map(torch.Tensor.pin_memory)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        """Return the same with `function` applied to every tensor."""

        def mapped(value: torch.Tensor | Documents | Ahead | None) -> Any:
            if isinstance(value, Documents):
                return value.map(function)
            if isinstance(value, Ahead):
                return Ahead(*map(function, value))
            return value if value is None else function(value)

        return Batch(**{field.name: mapped(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True)
class StageView:
    """The fields and positions that one rank reads from the samples of its microbatches."""

    is_first_stage: bool = True
    """Whether this rank's pipeline stage reads tokens and positions."""
    is_last_stage: bool = True
    """Whether it reads labels and the loss mask."""
    cp_rank: int = 0
    cp_size: int = 1
    """Number of context-parallel ranks, which share each sample's positions."""
    eod: int = -1
    """The token that ends a document."""
    restarts_positions: bool = False
    """Whether positions begin anew with each document; every stage reads them then."""
    separates_documents: bool = False
    """Whether tokens see their own document alone; every stage reads then where the documents are."""
    exchanges_heads: bool = False
    """Whether some layer's attention sees whole samples although context-parallel ranks share them."""
    depths: int = 0
    """Depths of multi-token prediction."""

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads the tokens of its samples."""
        predicts_ahead = self.is_last_stage and self.depths > 0
        return self.is_first_stage or predicts_ahead or self.restarts_positions or self.separates_documents

    @property
    def reads_samples(self) -> bool:
        """Whether it reads its samples at all."""
        return self.reads_tokens or self.is_last_stage


WHOLE = StageView()


def collate(samples: Sequence[Mapping[str, Any]], view: StageView = WHOLE) -> Batch:
    """Stack samples, with fields that are tensors or arrays of [S], into the batch that one stage reads.

    All fields cover all S positions, except `documents`, which are of the positions that the rank holds.

    A sample may say where its documents begin (`document_begins`, bool); else each begins after an end of document.
    """

    def stack(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.stack([torch.as_tensor(sample[name]) for sample in samples]).to(dtype)

    tokens = stack("tokens", torch.int64) if view.reads_tokens else None
    position_ids = documents = begins = None
    if any("document_begins" in sample for sample in samples):  # a padding sample is one document
        nothing = torch.zeros(len(samples[0]["tokens"]), dtype=torch.bool)
        begins = torch.stack([torch.as_tensor(sample.get("document_begins", nothing)) for sample in samples])
    if view.restarts_positions:
        assert tokens is not None
        position_ids = restarted_positions(tokens, view.eod, begins)
    elif view.is_first_stage:
        position_ids = stack("position_ids", torch.int64)
    if view.separates_documents:
        assert tokens is not None
        documents = documents_of(
            tokens, view.eod, view.cp_rank, view.cp_size, begins, exchanges_heads=view.exchanges_heads
        )
    labels = stack("labels", torch.int64) if view.is_last_stage else None
    loss_mask = stack("loss_mask", torch.float32) if view.is_last_stage else None
    ahead = None
    if tokens is not None and labels is not None and loss_mask is not None and view.depths:
        if begins is None and (view.separates_documents or view.restarts_positions):
            begins = begins_after_eod(tokens, view.eod)
        ahead = _ahead(tokens, labels, loss_mask, begins, view)
    return Batch(
        tokens=tokens if view.is_first_stage else None,
        position_ids=position_ids,
        labels=labels,
        loss_mask=loss_mask,
        documents=documents,
        ahead=ahead,
    )


def _ahead(tokens: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor, begins: Any, view: StageView) -> Ahead:
    """Return tokens, labels and weights of the depths, for whole samples. Where `begins` gives the beginnings of
    documents, a target in another document than its position has weight 0."""
    by = range(1, view.depths + 1)

    def shifted(values: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(values, (0, view.depths))
        return torch.stack([padded[:, depth : depth + values.size(1)] for depth in by], dim=-1)

    weights = shifted(mask)
    if begins is not None:
        # Of the token after the sample, the last target, only its end of document is known.
        starts = document_starts(torch.cat([begins, tokens[:, -1:] == view.eod], dim=1))
        weights *= shifted(starts[:, 1:]) == starts[:, :-1, None]
    return Ahead(shifted(tokens), shifted(labels), weights)


def divide(batch: Batch, view: StageView) -> Batch:
    """Return the two chunks of every sample that the context-parallel rank holds, in the order of their positions."""
    if view.cp_size == 1:
        return batch
    held = partial(held_positions, cp_rank=view.cp_rank, cp_size=view.cp_size)
    return replace(replace(batch, documents=None).map(held), documents=batch.documents)


def padding_sample(seq_length: int) -> dict[str, torch.Tensor]:
    """Return a sample that fills a place in a batch and that no loss counts: its loss mask is zero."""
    return {
        "tokens": torch.zeros(seq_length, dtype=torch.int64),
        "labels": torch.zeros(seq_length, dtype=torch.int64),
        "loss_mask": torch.zeros(seq_length, dtype=torch.float32),
        "position_ids": torch.arange(seq_length, dtype=torch.int64),
    }
