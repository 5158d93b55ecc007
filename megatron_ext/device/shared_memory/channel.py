"""A group's collectives through shared memory: slots, who has written, who has read.

Collectives of a group are numbered, alike on all ranks. A rank writes what it gives as soon as it calls (`issue`), into
the next slot of its size, and goes on; it reads what the others wrote when it waits for the work. The last one to write
rings the bell, on which the others sleep. A slot is used again when all ranks have read it.
"""

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from megatron_ext.device.shared_memory import futex
from megatron_ext.device.shared_memory.meeting import Members
from megatron_ext.device.shared_memory.poster import Poster
from megatron_ext.device.shared_memory.record import Record
from megatron_ext.device.shared_memory.segment import SLOTS, Segment
from megatron_ext.device.shared_memory.waiting import sleep_until
from megatron_ext.device.shared_memory.work import SharedWork

_EVERYBODY = -1


class Channel:
    """This rank's end."""

    def __init__(self, segment: Segment, members: Members, timeout: Callable[[], timedelta], record: Record):
        self.segment = segment
        self.members = members
        self.timeout = timeout
        self.rank = members.rank
        self.ranks = len(members.processes)
        self._record = record
        layout = segment.layout
        self._written = [layout.written(rank) for rank in range(self.ranks)]
        self._read = [layout.read(rank) for rank in range(self.ranks)]
        self._starts = [[layout.slot(kind, slot) for slot in range(SLOTS[kind][1])] for kind in range(len(SLOTS))]
        self._calls = [[layout.call(kind, slot, 0) for slot in range(SLOTS[kind][1])] for kind in range(len(SLOTS))]
        self._number = 0  # of the last collective issued
        self._issued = [0] * len(SLOTS)  # collectives of each size
        self._last_in_slot = [[0] * count for _, count in SLOTS]
        self._read_by_all = 0
        self._pending: deque[Collective] = deque()  # issued here, not read by this rank, in order
        self.lock = threading.RLock()
        self._poster = Poster(self.lock)

    def issue(self, work: "Collective", size: int) -> "Collective":
        """Write what this rank gives, now or as soon as there is a slot. Returns at once.

        Args:
            size: bytes of a row.
        """
        with self.lock:
            self._number = work.number = self._number + 1
            kind = 0 if size <= SLOTS[0][0] else 1
            slot = self._issued[kind] % SLOTS[kind][1]
            self._issued[kind] += 1
            before, self._last_in_slot[kind][slot] = self._last_in_slot[kind][slot], work.number
            work.start, work.row_size = self._starts[kind][slot], SLOTS[kind][0]
            work.calls = self._calls[kind][slot]
            work.entry = self._record.begin(work.name, work.number, work.given)
            self._pending.append(work)
            self._poster.post(functools.partial(self._post, work, before))
        return work

    def _post(self, work: "Collective", before: int) -> bool:
        """Write to a slot, unless somebody has not read its last collective; return whether it is written."""
        words = self.segment.words
        if before > self._read_by_all and not self._is_read(before):
            return False
        work.write()
        words[work.calls + self.rank] = work.call
        futex.fence()
        words[self._written[self.rank]] = number = work.number
        if work.source == self.rank:
            futex.wake(self.segment.address + 8 * self._written[self.rank])
        elif work.source == _EVERYBODY:
            futex.full_fence()
            if all(words[word] >= number for word in self._written):
                futex.fence()
                words[0] = number
                futex.wake(self.segment.address)
        return True

    def _is_read(self, number: int) -> bool:
        """Return whether all have read a collective; reads what this rank can, which holds up nobody then."""
        words = self.segment.words
        for work in list(self._pending):
            if work.number > number or not work.is_ready() or work.problem():
                break
            self.finish(work)
        self._read_by_all = min(words[word] for word in self._read)
        futex.fence()
        return self._read_by_all >= number

    def finish(self, work: "Collective") -> None:
        """Read a collective that is ready, once."""
        with self.lock:
            if work.finished:
                return
            problem = work.problem()
            if problem:
                raise RuntimeError(problem)
            work.read()
            work.end()
            pending = self._pending
            while pending and pending[0].finished:
                number = pending.popleft().number
                futex.fence()
                self.segment.words[self._read[self.rank]] = number

    def absent(self, number: int, source: int) -> list[int]:
        """Return the ranks that have not written to a collective."""
        words = self.segment.words
        ranks = range(self.ranks) if source == _EVERYBODY else (source,)
        return [rank for rank in ranks if words[self._written[rank]] < number]

    def written_word(self, source: int) -> int:
        """Return the word that reaches a collective's number when it can be read."""
        return 0 if source == _EVERYBODY else self._written[source]


class Collective(SharedWork):
    """A collective that this rank has issued. Subclasses write and read.

    Args:
        code: a number of what was called, up to 16 bits, which all ranks must call alike.
        size: bytes that a rank gives, likewise.
        source: the one rank whose writing the others wait for; else they wait for all.
    """

    def __init__(
        self,
        channel: Channel,
        name: str,
        code: int,
        size: int,
        tensors: list[Any],
        given: Sequence[torch.Tensor],
        source: int = _EVERYBODY,
    ):
        super().__init__(name, tensors, given)
        self.channel = channel
        self.call = code << 48 | size
        self.source = source
        self.word = channel.written_word(source)
        self.start = self.row_size = self.calls = 0  # where its slot is; set when it is issued

    def write(self) -> None:
        """Write what this rank gives."""

    def read(self) -> None:
        """Read what the others gave."""

    def is_ready(self) -> bool:
        """Return whether it can be read."""
        if self.channel.segment.words[self.word] < self.number:
            return False
        futex.fence()
        return True

    def await_ready(self, timeout: timedelta | None) -> None:
        channel = self.channel
        if channel.segment.words[self.word] < self.number:
            sleep_until(
                channel.segment,
                self.word,
                self.number,
                lambda: channel.absent(self.number, self.source),
                channel.members,
                channel.timeout if timeout is None else lambda: timeout,
                self.name,
            )
        futex.fence()

    def finish(self) -> None:
        self.channel.finish(self)

    def problem(self) -> str:
        """Return which rank has called something else; nothing where all have called the same."""
        channel = self.channel
        words = channel.segment.words
        ranks = range(channel.ranks) if self.source == _EVERYBODY else (self.source,)
        for rank in ranks:
            theirs = words[self.calls + rank]
            if theirs != self.call:
                here, there = channel.members.names[channel.rank], channel.members.names[rank]
                return (
                    f"{self.name}: rank {here} gives {_meaning(self.call)}, and rank {there} {_meaning(theirs)}: all "
                    "ranks of a group must call the same collectives in the same order, with equal sizes"
                )
        return ""


def _meaning(call: int) -> str:
    return f"{call & (1 << 48) - 1} bytes (call {call >> 48})"
