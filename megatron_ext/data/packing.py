"""Documents that lie end to end in one sample: where each begins, and which queries therefore see which keys.

A document ends with its end-of-document token. With --reset-attention-mask a token sees its own document alone, with
--reset-position-ids positions count from the document's first token (Megatron-LM's meaning of both).

A context-parallel rank counts positions in two ways: only the positions that it holds (everywhere but in attention), or
all positions of whole samples. `Documents` describe the positions that it holds; its field `whole` describes all.

Shape legend: B = samples in a microbatch, S = tokens in a sample, s = tokens of a sample that a context-parallel rank
holds.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_ext.config.derived.rank_order import context_chunks


class Segment(NamedTuple):
    """Consecutive queries and the consecutive keys that they see: the last query sees all of them, the one before it
    all but the last, and so on."""

    first_query: int
    queries: int
    first_key: int
    keys: int

    @property
    def rows(self) -> slice:
        return slice(self.first_query, self.first_query + self.queries)


@dataclass(frozen=True)
class Documents:
    """The documents of a microbatch at the positions that this rank holds, and as attention over its samples laid end
    to end takes them: queries of these positions, and keys of whole samples."""

    begins_BS: torch.Tensor
    """bool [B, s], whether a document begins with each token that this rank holds."""
    segments: tuple[Segment, ...]
    """Attention blocks in the order of the queries, which they cover. Key k of sample b is number b x S + k."""
    query_ends: torch.Tensor
    """int32 [segments + 1], cumulative numbers of queries from 0."""
    key_ends: torch.Tensor
    """int32 [segments + 1], cumulative numbers of keys; the same object as `query_ends` where every segment has as many
    keys as queries, which is how torch's cuDNN kernel knows it."""
    key_index: torch.Tensor | None
    """int64, the keys of all segments one after another; None where they are all keys in their order."""
    longest: tuple[int, int]
    """Largest number of queries, and of keys, of a segment."""
    whole: "Documents | None" = None
    """The documents at all positions of the samples, for layers whose context-parallel ranks exchange heads (a2a)."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "Documents":
        """Return the same with `function` applied to every tensor."""
        index = None if self.key_index is None else function(self.key_index)
        query_ends = function(self.query_ends)
        key_ends = query_ends if self.key_ends is self.query_ends else function(self.key_ends)
        whole = None if self.whole is None else self.whole.map(function)
        return Documents(function(self.begins_BS), self.segments, query_ends, key_ends, index, self.longest, whole)


def begins_after_eod(tokens_BS: torch.Tensor, eod: int) -> torch.Tensor:
    """Return whether a document begins with each token, bool [B, S], where only the end of each is known."""
    begins = torch.zeros_like(tokens_BS, dtype=torch.bool)
    begins[:, 1:] = tokens_BS[:, :-1] == eod
    return begins


def document_starts(begins_BS: torch.Tensor) -> torch.Tensor:
    """Return for every token the position of its document's first token, int64 [B, S]. A sample begins a document."""
    return torch.where(begins_BS, torch.arange(begins_BS.size(1)), 0).cummax(dim=1).values


def restarted_positions(tokens_BS: torch.Tensor, eod: int, begins_BS: torch.Tensor | None = None) -> torch.Tensor:
    """Return positions that count from the beginning of each document, int64 [B, S].

    Args:
        tokens_BS: the samples.
        eod: the token that ends a document.
        begins_BS: bool, whether a document begins with each token; by default one begins after each `eod`.
    """
    begins = begins_after_eod(tokens_BS, eod) if begins_BS is None else begins_BS
    return torch.arange(tokens_BS.size(1)) - document_starts(begins)


def held_positions(values_BS: torch.Tensor, cp_rank: int, cp_size: int) -> torch.Tensor:
    """Return the two chunks of every sample that a context-parallel rank holds, in the order of their positions,
    [B, s, ...]."""
    if cp_size == 1:
        return values_BS
    chunks = torch.tensor(context_chunks(cp_rank, cp_size))
    return values_BS.unflatten(1, (2 * cp_size, -1))[:, chunks].flatten(1, 2)


def documents_of(
    tokens_BS: torch.Tensor,
    eod: int,
    cp_rank: int = 0,
    cp_size: int = 1,
    begins_BS: torch.Tensor | None = None,
    *,
    exchanges_heads: bool = False,
) -> Documents:
    """Return the documents of whole samples at the positions that one of `cp_size` context-parallel ranks holds, and
    with `exchanges_heads` at all positions as well.

    A rank has two chunks of every sample, and begins a segment wherever a document or a chunk begins. `begins_BS` is as
    in `restarted_positions`.
    """
    segments, first_query = [], 0
    begins = (begins_after_eod(tokens_BS, eod) if begins_BS is None else begins_BS).clone()
    begins[:, 0] = True
    for sample, row in enumerate(begins):
        borders = [0, *(row[1:].nonzero().flatten() + 1).tolist(), len(row)]
        for first, last, document in _held(borders, cp_rank, cp_size):
            segments.append(Segment(first_query, last - first, sample * len(row) + document, last - document))
            first_query += last - first
    query_ends = torch.tensor([0, *(segment.queries for segment in segments)], dtype=torch.int32).cumsum(
        0, dtype=torch.int32
    )
    key_ends = query_ends
    if any(segment.keys != segment.queries for segment in segments):
        key_ends = torch.tensor([0, *(segment.keys for segment in segments)], dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        )
    index = None
    if cp_size > 1:
        index = torch.cat([torch.arange(segment.first_key, segment.first_key + segment.keys) for segment in segments])
    longest = max(segment.queries for segment in segments), max(segment.keys for segment in segments)
    whole = documents_of(tokens_BS, eod, begins_BS=begins) if exchanges_heads and cp_size > 1 else None
    own_begins = held_positions(begins, cp_rank, cp_size)
    return Documents(own_begins, tuple(segments), query_ends, key_ends, index, longest, whole)


def _held(borders: list[int], cp_rank: int, cp_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first position, end, first position of the document) of every piece of a document that the rank holds."""
    length = borders[-1] // (2 * cp_size)
    # One rank's two chunks are the whole sample: a border between them would only split a document.
    chunks = (
        [(0, borders[-1])]
        if cp_size == 1
        else [(i * length, (i + 1) * length) for i in context_chunks(cp_rank, cp_size)]
    )
    for begin, end in chunks:
        for document, next_document in itertools.pairwise(borders):
            first, last = max(begin, document), min(end, next_document)
            if first < last:
                yield first, last, document
