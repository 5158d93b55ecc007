"""The file in memory that all ranks of a group map, and what lies where in it.

It has no name in any folder, so that nothing stays behind however its processes end. It is sparse: it takes the pages
that were written.

    words, a cache line each   the bell; for each rank: collectives written, collectives read;
                               for each pair of ranks: messages written, messages read
    calls                      for each slot and rank: what the rank has called
    slots of collectives       rows of one size, one for each rank
    slots of messages          for each pair of ranks
"""

import ctypes
import mmap
from dataclasses import dataclass

import torch

_LINE = 8  # words of a cache line
_PAGE = 4096
_KEPT_VIEWS = 2000

LARGEST = 1 << 20
"""Bytes that a rank gives to a collective, or sends, at most; what is larger is gloo's."""

MOST_RANKS = 16
"""Ranks of a group at most: each reads what every other one wrote."""

SLOTS = ((16 << 10, 16), (LARGEST, 4))
"""Bytes of a row, and number of slots, for small collectives and for the others."""

MAIL_SLOTS = 4
"""Messages from one rank to another that may wait to be read."""


@dataclass(frozen=True)
class Layout:
    """Where things lie in a group's memory; words count from 0, in units of 8 bytes."""

    ranks: int

    bell = 0
    """The word with the number of the last collective to which all ranks have written."""

    def written(self, rank: int) -> int:
        """Return the word with the number of the last collective to which a rank has written."""
        return _LINE * (1 + rank)

    def read(self, rank: int) -> int:
        """Return the word with the number of the last collective that a rank has read, with all before it."""
        return _LINE * (1 + self.ranks + rank)

    def sent(self, source: int, target: int) -> int:
        """Return the word with the number of messages written from one rank to another."""
        return _LINE * (1 + 2 * self.ranks + 2 * (source * self.ranks + target))

    def taken(self, source: int, target: int) -> int:
        """Return the word with the number of messages read of those."""
        return self.sent(source, target) + _LINE

    def call(self, kind: int, slot: int, rank: int) -> int:
        """Return the word that says what a rank has called."""
        first = _LINE * (1 + 2 * self.ranks + 2 * self.ranks**2)
        return first + (sum(count for _, count in SLOTS[:kind]) + slot) * self.ranks + rank

    def label(self, source: int, target: int, slot: int) -> int:
        """Return the word with the size of a message."""
        first = self.call(len(SLOTS), 0, 0)
        return first + (source * self.ranks + target) * MAIL_SLOTS + slot

    def slot(self, kind: int, number: int) -> int:
        """Return the first byte of a slot of collectives; rank r's row begins r rows after it."""
        start = -(-8 * self.label(self.ranks, 0, 0) // _PAGE) * _PAGE
        start += sum(size * count for size, count in SLOTS[:kind]) * self.ranks
        return start + number * self.ranks * SLOTS[kind][0] if kind < len(SLOTS) else start

    def message(self, source: int, target: int, slot: int) -> int:
        """Return the first byte of a message."""
        place = (source * self.ranks + target) * MAIL_SLOTS + slot
        return self.slot(len(SLOTS), 0) + place * LARGEST

    @property
    def size(self) -> int:
        """Return the bytes of all, most of which are never touched."""
        return self.message(self.ranks, 0, 0)


class Segment:
    """A mapping of a group's memory.

    Raises:
        OSError: the file cannot be mapped.
    """

    def __init__(self, file: int, ranks: int):
        self.layout = Layout(ranks)
        self.memory = mmap.mmap(file, self.layout.size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.words = memoryview(self.memory).cast("Q")
        self._tensors: dict[torch.dtype, torch.Tensor] = {}
        self._rows: dict[tuple[torch.dtype, int, int], list[torch.Tensor]] = {}

    def rows(self, dtype: torch.dtype, start: int, count: int, row_size: int) -> list[torch.Tensor]:
        """Return `count` elements of each rank's row, as views.

        Args:
            start: the first byte, in row 0.
            row_size: bytes from one row to the next, which follow from `start`.
        """
        key = (dtype, start, count)
        rows = self._rows.get(key)
        if rows is None:
            if len(self._rows) >= _KEPT_VIEWS:
                self._rows.clear()
            whole = self._tensors.get(dtype)
            if whole is None:
                whole = self._tensors[dtype] = torch.frombuffer(self.memory, dtype=dtype)
            starts = (start + rank * row_size for rank in range(self.layout.ranks))
            rows = [whole.as_strided((count,), (1,), first // dtype.itemsize) for first in starts]
            self._rows[key] = rows
        return rows
