"""Gathers weights of megatron-core's distributed optimizer in eight bits, where they have a `Narrow`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_ext.device.uneven_gather import gather_uneven
from megatron_ext.parallel.narrow import Held, Narrow, agree, narrow_of


@dataclass(frozen=True)
class _Piece:
    """Neighbouring elements of a bucket that one rank sends: of a weight in eight bits, or of others as they are."""

    bucket: torch.Tensor
    begin: int
    end: int
    narrow: Narrow | None
    offset: int
    """Index of the first element in the weight."""

    @property
    def elements(self) -> torch.Tensor:
        return self.bucket[self.begin : self.end]

    @property
    def bytes(self) -> int:
        return (self.end - self.begin) * (self.bucket.element_size() if self.narrow is None else 1)

    def place(self) -> torch.Tensor:
        """Return the bytes that the piece is received into."""
        if self.narrow is None:
            return self.elements.view(torch.uint8)
        assert self.narrow.values is not None, "there is room for it"
        return self.narrow.values[self.offset : self.offset + self.end - self.begin]


class NarrowBuckets:
    """Gathers a group of buckets of megatron-core's distributed optimizer, which calls it in place of its own gather:
    after an update in eight bits where weights have them, and when told to (`force_sync`) all as they are.

    Args:
        group: a `_ParamAndGradBucketGroup` with at least one weight that has a `Narrow`.
    """

    def __init__(self, group: Any):
        self.group, self._gather_whole = group, group.start_param_sync
        self.ranks: ProcessGroup = group.intra_distributed_optimizer_instance_group
        self.narrow = [one for bucket in group.buckets for weight in bucket.params_list if (one := narrow_of(weight))]
        self._pieces = [self._sent_by(rank) for rank in range(self.ranks.size())]
        group.start_param_sync = self.start

    @property
    def is_narrow(self) -> bool:
        """Whether this rank lacks other ranks' weights as they are."""
        return any(one.values is not None for one in self.narrow)

    def start(self, force_sync: bool = False) -> None:
        """Begin to gather, as megatron-core's method of this name says; with `force_sync` gather the weights as they
        are, and return when they are here."""
        group = self.group
        if force_sync:
            if group.param_gather_handle is not None:
                group.param_gather_handle.wait()
                group.param_gather_handle = None
            self._gather_whole(force_sync=True)
            for one in self.narrow:
                one.values = None
            return
        assert group.param_gather_handle is None, "one gather at a time"
        arrival = self._send()
        if group.ddp_config.overlap_param_gather:
            group.param_gather_handle = arrival
        else:
            arrival.wait()
        group.param_gather_dispatched = True

    @torch.no_grad()
    def _send(self) -> "_Arrival":
        own = self._pieces[self.ranks.rank()]
        held = {id(piece.narrow): piece for piece in own}
        parts = []
        for one in self.narrow:
            piece = held.get(id(one))
            parts.append(Held(one, self._nothing() if piece is None else piece.elements, piece.offset if piece else 0))
        agree(parts, self.ranks)
        for one, size in zip(self.narrow, self._sizes(), strict=True):
            if one.values is None:
                one.values = torch.empty(size, dtype=torch.uint8, device=self._nothing().device)
        sent = [
            piece.elements.view(torch.uint8)
            if piece.narrow is None
            else piece.narrow.narrowed(piece.elements, piece.offset)
            for piece in own
        ]
        message = torch.cat(sent) if sent else self._nothing().view(torch.uint8)
        sizes = [sum(piece.bytes for piece in pieces) for pieces in self._pieces]
        return _Arrival(*gather_uneven(message, sizes, self.ranks), self._pieces)

    def _nothing(self) -> torch.Tensor:
        return self.group.buckets[0].param_data[:0]

    def _sizes(self) -> list[int]:
        weights = (weight for bucket in self.group.buckets for weight in bucket.params_list)
        return [weight.numel() for weight in weights if narrow_of(weight) is not None]

    def _sent_by(self, rank: int) -> list[_Piece]:
        """Return the pieces of a rank's shards, one bucket after another."""
        pieces: list[_Piece] = []
        for bucket in self.group.buckets:
            size = bucket.param_data.numel() // self.ranks.size()
            first, last = rank * size, (rank + 1) * size
            places = sorted(
                (*bucket.param_to_index[weight], narrow_of(weight))
                for weight in bucket.params_list
                if narrow_of(weight) is not None
            )
            at = first
            for start, end, narrow in places:
                begin, stop = max(start, first), min(end, last)
                if begin < stop:
                    pieces += [_Piece(bucket.param_data, at, begin, None, 0)] if at < begin else []
                    pieces.append(_Piece(bucket.param_data, begin, stop, narrow, begin - start))
                    at = stop
            pieces += [_Piece(bucket.param_data, at, last, None, 0)] if at < last else []
        return pieces


class _Arrival:
    """What megatron-core waits for before it computes with gathered weights."""

    def __init__(self, works: Sequence[Any], messages: Sequence[torch.Tensor], pieces: Sequence[Sequence[_Piece]]):
        self._works, self._messages, self._pieces = works, messages, pieces

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the messages, and put their bytes to their places."""
        for work in self._works:
            work.wait()
        for message, pieces in zip(self._messages, self._pieces, strict=True):
            for piece, received in zip(pieces, message.split([one.bytes for one in pieces]), strict=True):
                piece.place().copy_(received)


def narrow_buckets(groups: Iterable[Any]) -> list[NarrowBuckets]:
    """Have those groups of buckets gather in eight bits that are divided and have such weights."""
    return [
        NarrowBuckets(group)
        for group in groups
        if group.intra_distributed_optimizer_instance_group.size() > 1
        and any(narrow_of(weight) is not None for bucket in group.buckets for weight in bucket.params_list)
    ]
