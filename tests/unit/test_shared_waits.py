"""Waits through shared memory, and where things lie in it: what a rank that waits sees of the others. Clocks and
processes are stand-ins; tests/distributed/test_shared_memory.py has real ones."""

import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.device.shared_memory import any_source, segment, waiting
from megatron_ext.device.shared_memory.any_source import MessageFromAnyone
from megatron_ext.device.shared_memory.meeting import Members
from megatron_ext.device.shared_memory.segment import LARGEST, MAIL_SLOTS, SLOTS, Layout, Segment

MEMBERS = Members(rank=0, processes=(500, 501, 502), names=(4, 6, 8))


class Clock:
    """A clock that goes on by what is slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slept: float):
        self.now, self.slept, self.at = 100.0, slept, dict[float, Any]()
        for module in (waiting, any_source):
            monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
            monkeypatch.setattr(module.time, "sleep", lambda _seconds: self.sleep())
        monkeypatch.setattr(waiting.futex, "sleep", lambda _address, _value: self.sleep())

    def sleep(self) -> None:
        self.now += self.slept
        for moment in [moment for moment in self.at if moment <= self.now - 100.0]:
            self.at.pop(moment)()


def _wait(words: list[int], late: Any, limit: timedelta) -> None:
    here: Any = SimpleNamespace(words=words, address=0)
    waiting.sleep_until(here, 1, 9, late, MEMBERS, lambda: limit, "all_reduce")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of processes that have ended."""
    gone: set[int] = set()
    monkeypatch.setattr(waiting.peers, "has_ended", gone.__contains__)
    return gone


@pytest.mark.parametrize(
    ("limit", "shown"),
    [
        (timedelta(milliseconds=500), "500ms"),
        (timedelta(seconds=2, microseconds=1500), "2001ms"),
        (timedelta(days=1, seconds=3), "86403000ms"),
    ],
)
def test_a_wait_ends_with_the_groups_timeout(
    limit: timedelta, shown: str, ended: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before, and not long after; who did not come is named."""
    step = min(limit.total_seconds() / 8, 2.0)
    clock = Clock(monkeypatch, step)
    if limit > timedelta(days=1):
        clock.at = {limit.total_seconds() - 3.5: lambda: words.__setitem__(1, 9)}
        clock.slept = 2.5
    words = [0, 8]
    if clock.at:
        _wait(words, lambda: [1], limit)
        assert clock.now - 100.0 >= limit.total_seconds() - 3.5
        return
    said = f"Timed out waiting {shown} in all_reduce through shared memory: rank 6 (process 501), rank 8 (process 502)"
    with pytest.raises(RuntimeError) as error:
        _wait(words, lambda: [2, 1], limit)
    assert str(error.value) == f"{said} did not come"
    waited = clock.now - 100.0
    assert limit.total_seconds() < waited <= limit.total_seconds() + step


def test_time_in_which_the_job_was_suspended_does_not_count(ended: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep of 0.05 s that took an hour."""
    words = [0, 8]
    clock = Clock(monkeypatch, 3600.0)
    clock.at = {3600.0: lambda: setattr(clock, "slept", 0.05), 3601.0: lambda: words.__setitem__(1, 9)}
    _wait(words, lambda: [1], timedelta(seconds=2))
    assert 3601.0 <= clock.now - 100.0 < 3601.1


def test_a_lost_rank_ends_a_wait(ended: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, 0.05)
    ended |= {502, 500}
    with pytest.raises(RuntimeError) as error:
        _wait([0, 8], lambda: [1, 2], timedelta(seconds=60))
    assert str(error.value) == (
        "Connection closed by peer: rank 8 (process 502) ended before all_reduce through shared memory"
    )


def test_who_came_just_before_it_ended_is_not_lost(ended: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    clock, words = Clock(monkeypatch, 0.05), [0, 8]
    ended.add(502)
    late: Iterator[list[int]] = iter([[2], [], [1], [1], []])
    _wait(words, lambda: next(late), timedelta(seconds=60))
    assert next(late, None) is None
    assert clock.now > 100.1


@pytest.fixture
def boxes(ended: set[int]) -> list[Any]:
    """Mailboxes of a rank of three, from the two others, whose messages come in the rounds that they say."""
    channel = SimpleNamespace(rank=0, members=MEMBERS, timeout=lambda: timedelta(seconds=5))
    made: list[Any] = [SimpleNamespace(source=source, channel=channel, sends=False, asked=0) for source in (1, 2)]

    def receive(box: Any) -> Any:
        box.asked += 1
        if not box.sends:
            return None
        box.sends = False
        return SimpleNamespace(source_rank=lambda: box.source, finish=lambda: box.read.append(box.source))

    for box in made:
        box.read = []
        box.receive_if_sent = lambda _tensor, box=box: receive(box)
    return made


def test_a_message_from_anyone_is_the_first_that_comes(boxes: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the only one that is taken."""
    clock = Clock(monkeypatch, 0.25)
    clock.at = {1.0: lambda: [setattr(box, "sends", True) for box in boxes[1:]]}
    message = MessageFromAnyone(boxes, torch.zeros(1))
    assert message.source_rank() == -1
    assert message.complete()
    assert (message.source_rank(), boxes[1].read, message.finished) == (2, [2], True)
    boxes[0].sends = True
    assert message.is_completed()
    assert boxes[0].sends, "another message is another's"


@pytest.mark.parametrize(("given", "limit"), [(None, 5.0), (timedelta(seconds=2), 2.0), (timedelta(days=2), None)])
def test_nobody_sends(
    given: timedelta | None, limit: float | None, boxes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, 0.25)
    if limit is None:
        clock.slept, clock.at = 3600.0, {40 * 3600.0: lambda: setattr(boxes[0], "sends", True)}
        assert MessageFromAnyone(boxes, torch.zeros(1)).complete(given)
        return
    with pytest.raises(RuntimeError, match=f"Timed out waiting {limit * 1000:.0f}ms in recv 0<-anyone"):
        MessageFromAnyone(boxes, torch.zeros(1)).complete(given)
    assert clock.now - 100.0 == limit + 0.25


def test_a_message_from_anyone_is_lost_when_all_have_ended(
    boxes: list[Any], ended: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, 0.25)
    ended.add(501)
    clock.at = {1.0: lambda: ended.add(502)}
    with pytest.raises(RuntimeError, match="every other rank ended before recv 0<-anyone"):
        MessageFromAnyone(boxes, torch.zeros(1)).complete()
    assert clock.now == 101.0


def test_what_a_rank_sent_before_it_ended_is_received(
    boxes: list[Any], ended: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch, 0.25)
    asked = itertools.count()

    def has_ended(process: int) -> bool:
        if next(asked) == 1:
            boxes[1].sends = True
        return True

    monkeypatch.setattr(any_source.peers, "has_ended", has_ended)
    message = MessageFromAnyone(boxes, torch.zeros(1))
    assert message.complete()
    assert message.source_rank() == 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_lies_on_another_in_the_memory(ranks: int) -> None:
    """Words that several write lie in cache lines of their own; all else follows without a gap that is too small."""
    layout = Layout(ranks)
    pairs = list(itertools.product(range(ranks), repeat=2))
    of_ranks = [word(rank) for word in (layout.written, layout.read) for rank in range(ranks)]
    of_pairs = [word(*pair) for word in (layout.sent, layout.taken) for pair in pairs]
    busy = [layout.bell, *of_ranks, *of_pairs]
    assert len({word // 8 for word in busy}) == len(busy), "a cache line has 8 words"
    kinds = [(kind, slot) for kind, (_, count) in enumerate(SLOTS) for slot in range(count)]
    calls = [layout.call(*place, rank) for place in kinds for rank in range(ranks)]
    labels = [layout.label(*pair, slot) for pair in pairs for slot in range(MAIL_SLOTS)]
    words = [*busy, *calls, *labels]
    assert len(set(words)) == len(words)
    assert calls == sorted(calls)
    spans = [(layout.slot(*place), ranks * SLOTS[place[0]][0]) for place in kinds]
    spans += [(layout.message(*pair, slot), LARGEST) for pair in pairs for slot in range(MAIL_SLOTS)]
    spans.sort()
    assert 8 * max(words) + 8 <= spans[0][0]
    assert spans[0][0] % 4096 == 0
    for (start, size), (following, _) in itertools.pairwise(spans):
        assert start + size <= following
    assert sum(spans[-1]) <= layout.size


@pytest.fixture
def memory() -> Segment:
    file = os.memfd_create("test")
    os.ftruncate(file, Layout(2).size)
    try:
        return Segment(file, 2)
    finally:
        os.close(file)


def test_rows_are_read_in_the_type_that_is_asked_for(memory: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one place in turn, as collectives of several types use a slot; and few views of them are kept."""
    start, row_size = memory.layout.slot(0, 1), SLOTS[0][0]
    for rank, value in enumerate((1.0, -2.5)):
        memory.rows(torch.float32, start, 3, row_size)[rank].fill_(value)
    for dtype in (torch.int32, torch.float32, torch.int32, torch.float64):
        count = 12 // dtype.itemsize
        found = memory.rows(dtype, start, count, row_size)
        expected = [torch.full((3,), value).view(torch.int32) for value in (1.0, -2.5)]
        assert [row.dtype for row in found] == [dtype, dtype]
        for row, bits in zip(found, expected, strict=True):
            assert row.numel() == count
            assert torch.equal(row.view(torch.int32), bits[: count * dtype.itemsize // 4])
    monkeypatch.setattr(segment, "_KEPT_VIEWS", 5)
    for count in range(1, 30):
        assert len(memory.rows(torch.uint8, start, count, row_size)[1]) == count
        assert len(memory._rows) <= 5
