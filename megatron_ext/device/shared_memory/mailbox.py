"""Messages from one rank of a group to another through shared memory.

The messages between two ranks are numbered in each direction. A sender writes into the next slot and goes on; where all
slots are full, a thread writes when the receiver has read one.
"""

import ctypes
import threading
from collections import deque
from datetime import timedelta

import torch

from megatron_ext.device.shared_memory import futex
from megatron_ext.device.shared_memory.channel import Channel
from megatron_ext.device.shared_memory.poster import Poster
from megatron_ext.device.shared_memory.record import Record
from megatron_ext.device.shared_memory.segment import MAIL_SLOTS, Layout
from megatron_ext.device.shared_memory.waiting import sleep_until
from megatron_ext.device.shared_memory.work import SharedWork


def _places(layout: Layout, source: int, target: int) -> list[tuple[int, int]]:
    """Return each slot's first byte, and the word with the size of its message."""
    slots = range(MAIL_SLOTS)
    return [(layout.message(source, target, slot), layout.label(source, target, slot)) for slot in slots]


class Outgoing:
    """Messages from this rank to one other."""

    def __init__(self, channel: Channel, target: int, record: Record):
        self.segment, self._record = channel.segment, record
        layout = self.segment.layout
        self.target = target
        self._sent, self.taken = layout.sent(channel.rank, target), layout.taken(channel.rank, target)
        self._places = _places(layout, channel.rank, target)
        self._issued = 0
        self._lock = threading.RLock()
        self._poster = Poster(self._lock)
        self.channel = channel

    def send(self, tensor: torch.Tensor) -> "SentMessage":
        """Return the work of sending a tensor, which is mostly done."""
        with self._lock:
            self._issued += 1
            work = SentMessage(self, self._issued, tensor)
            work.entry = self._record.begin(work.name, work.number, work.given, is_message=True)
            self._poster.post(work.write)
        return work

    def write(self, number: int, tensor: torch.Tensor) -> bool:
        """Write a message; return whether there was room."""
        segment, words = self.segment, self.segment.words
        if number - words[self.taken] > MAIL_SLOTS:
            return False
        futex.fence()
        start, label = self._places[number % MAIL_SLOTS]
        ctypes.memmove(segment.address + start, tensor.data_ptr(), tensor.nbytes)
        words[label] = tensor.nbytes
        futex.fence()
        words[self._sent] = number
        futex.wake(segment.address + 8 * self._sent)
        return True


class SentMessage(SharedWork):
    """A message that this rank sends. It is done when it is written."""

    def __init__(self, box: Outgoing, number: int, tensor: torch.Tensor):
        super().__init__(f"send {box.channel.rank}->{box.target}", [tensor])
        self.number = number
        self._box = box
        self._written = threading.Event()

    def write(self) -> bool:
        """Write the message; return whether there was room."""
        if not self._box.write(self.number, self.tensors[0]):
            return False
        self.end()
        self._written.set()
        return True

    def is_ready(self) -> bool:
        return self.finished

    def await_ready(self, timeout: timedelta | None) -> None:
        box, room = self._box, self.number - MAIL_SLOTS
        words, taken = box.segment.words, box.taken
        sleep_until(
            box.segment,
            taken,
            room,
            lambda: [box.target] if words[taken] < room else [],
            box.channel.members,
            box.channel.timeout if timeout is None else lambda: timeout,
            self.name,
        )
        self._written.wait()

    def finish(self) -> None:
        """Do nothing: who waited found it written."""


class Incoming:
    """Messages from one other rank to this one."""

    def __init__(self, channel: Channel, source: int, record: Record):
        self.channel, self.segment, self.source, self._record = channel, channel.segment, source, record
        layout = self.segment.layout
        self.sent, self._taken = layout.sent(source, channel.rank), layout.taken(source, channel.rank)
        self._places = _places(layout, source, channel.rank)
        self._issued = 0
        self._unread: deque[ReceivedMessage] = deque()
        self._lock = threading.RLock()

    def receive(self, tensor: torch.Tensor) -> "ReceivedMessage":
        """Return the work of receiving the next message into a tensor."""
        with self._lock:
            self._issued += 1
            work = ReceivedMessage(self, self._issued, tensor)
            self._unread.append(work)
            work.entry = self._record.begin(work.name, work.number, work.given, is_message=True)
        return work

    def receive_if_sent(self, tensor: torch.Tensor) -> "ReceivedMessage | None":
        """Return the work of receiving the next message into a tensor, if that message has been sent already."""
        with self._lock:
            has_come = self.segment.words[self.sent] > self._issued
            return self.receive(tensor) if has_come else None

    def read(self, last: "ReceivedMessage") -> None:
        """Read a message that is there, and those before it, which make room for the next ones."""
        with self._lock:
            while not last.finished:
                self._read(self._unread[0])
                self._unread.popleft()

    def _read(self, work: "ReceivedMessage") -> None:
        segment, words = self.segment, self.segment.words
        start, label = self._places[work.number % MAIL_SLOTS]
        given, size = words[label], work.tensors[0].nbytes
        if given != size:
            raise RuntimeError(f"{work.name}: {size} bytes are expected, and {given} were sent")
        ctypes.memmove(work.tensors[0].data_ptr(), segment.address + start, size)
        work.end()
        futex.fence()
        words[self._taken] = work.number
        futex.wake(segment.address + 8 * self._taken)

    def earliest(self, last: "ReceivedMessage") -> "ReceivedMessage | None":
        """Return the first message up to this one that has not been read."""
        with self._lock:
            return None if last.finished else self._unread[0]


class ReceivedMessage(SharedWork):
    """A message that this rank receives."""

    def __init__(self, box: Incoming, number: int, tensor: torch.Tensor):
        super().__init__(f"recv {box.channel.rank}<-{box.source}", [tensor])
        self.number = number
        self._box = box

    def _source_rank(self) -> int:
        return self._box.source

    def is_ready(self) -> bool:
        if self._box.segment.words[self._box.sent] < self.number:
            return False
        futex.fence()
        return True

    def await_ready(self, timeout: timedelta | None) -> None:
        # One after the other: where the slots are few, the next is sent when the first has been read.
        while (work := self._box.earliest(self)) is not None:
            self._await(work.number, timeout)
            self._box.read(work)

    def _await(self, number: int, timeout: timedelta | None) -> None:
        box = self._box
        words, sent = box.segment.words, box.sent
        if words[sent] < number:
            sleep_until(
                box.segment,
                sent,
                number,
                lambda: [box.source] if words[sent] < number else [],
                box.channel.members,
                box.channel.timeout if timeout is None else lambda: timeout,
                self.name,
            )
        futex.fence()

    def finish(self) -> None:
        self._box.read(self)
