"""Collectives in shared memory by themselves: which slot, when it may be used again, and tensors that are not
contiguous. Stand-ins take the place of the memory; tests/distributed/test_shared_memory.py has real ranks."""

import ctypes
import os
import threading
import time
from collections import deque
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.device.shared_memory import channel as module
from megatron_ext.device.shared_memory import collectives, mailbox, meeting, replaced
from megatron_ext.device.shared_memory.channel import Channel
from megatron_ext.device.shared_memory.collectives import AllGather, AllReduce, AllToAll, ReduceScatter, _fill
from megatron_ext.device.shared_memory.mailbox import Incoming, Outgoing
from megatron_ext.device.shared_memory.poster import Poster
from megatron_ext.device.shared_memory.ring_order import MEAN
from megatron_ext.device.shared_memory.segment import MAIL_SLOTS, MOST_RANKS, SLOTS
from megatron_ext.device.shared_memory.work import SharedWork

SUM = torch.distributed.ReduceOp.RedOpType.__members__["SUM"].value
NOTHING: Any = None


def _channel(**fields: Any) -> Any:
    """Rank 0 of two, whose words are: ready, written by each, read by each."""
    made: Any = object.__new__(Channel)
    vars(made).update(
        rank=0,
        ranks=2,
        segment=SimpleNamespace(words=[0] * 12, address=0),
        lock=threading.RLock(),
        _written=[1, 2],
        _read=[3, 4],
        _read_by_all=0,
        _pending=deque(),
        **fields,
    )
    return made


class _Work:
    """A collective that can be read, or that has failed."""

    def __init__(self, number: int, problem: str = ""):
        self.number, self.source, self.call, self.calls, self.finished = number, 0, 77, 6, False
        self._problem, self.done = problem, []

    def is_ready(self) -> bool:
        return True

    def problem(self) -> str:
        return self._problem

    def write(self) -> None:
        self.done.append("write")

    def read(self) -> None:
        self.done.append("read")

    def end(self) -> None:
        self.finished = True


@pytest.fixture(autouse=True)
def _nobody_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.futex, "wake", lambda address: None)
    monkeypatch.setattr(module.futex, "fence", lambda: None)


def test_a_slot_is_written_when_all_have_read_its_last_collective() -> None:
    made, work = _channel(), _Work(9)
    words = made.segment.words
    words[3], words[4] = 5, 4
    assert not made._post(work, 5), "rank 1 still reads"
    assert work.done == []
    assert words[1] == 0
    words[4] = 5
    assert made._post(work, 5)
    assert (work.done, words[6], words[1]) == (["write"], 77, 9)
    assert made._read_by_all == 5


def test_what_a_rank_can_read_it_reads_before_it_waits() -> None:
    """In their order, and no further than what has failed, of which its caller hears."""
    made = _channel()
    first, second, third = works = [_Work(1), _Work(2, "rank 1 called another"), _Work(3)]
    made._pending.extend(works)
    made.segment.words[4] = 7
    assert made._is_read(1)
    assert not made._is_read(3)
    assert [work.done for work in works] == [["read"], [], []]
    assert (first.finished, second.finished, third.finished) == (True, False, False)
    assert made.segment.words[3] == 1
    with pytest.raises(RuntimeError, match="rank 1 called another"):
        made.finish(second)


@pytest.mark.parametrize(("size", "kind"), [(0, 0), (SLOTS[0][0], 0), (SLOTS[0][0] + 1, 1), (SLOTS[1][0], 1)])
def test_a_row_goes_into_the_smallest_slot_that_holds_it(size: int, kind: int) -> None:
    posted: list[Any] = []
    noted: list[Any] = []
    made = _channel(
        _number=40,
        _issued=[1, SLOTS[1][1]],
        _last_in_slot=[[0] * SLOTS[0][1], [30] * SLOTS[1][1]],
        _starts=[[10 + slot for slot in range(SLOTS[0][1])], [90 + slot for slot in range(SLOTS[1][1])]],
        _calls=[[0] * SLOTS[0][1], [5] * SLOTS[1][1]],
        _record=SimpleNamespace(begin=lambda *what: noted.append(what) or "its entry"),
        _poster=SimpleNamespace(post=posted.append),
    )
    work: Any = SimpleNamespace(name="all_reduce", given=[torch.zeros(3)])
    assert made.issue(work, size) is work
    assert noted == [("all_reduce", 41, work.given)]
    assert work.entry == "its entry"
    place = 1 if kind == 0 else 0  # of as many as there are, the next
    assert (work.number, work.start, work.row_size) == (41, (10, 90)[kind] + place, SLOTS[kind][0])
    [post] = posted
    assert post.args == (work, (0, 30)[kind])
    assert made._last_in_slot[kind][place] == 41


def test_results_reach_tensors_that_are_not_contiguous() -> None:
    numbers = torch.arange(6.0)
    whole = torch.zeros(3, 2).t()
    _fill(whole, lambda target: ctypes.memmove(target, numbers.data_ptr(), 24))
    assert whole.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    straight = torch.zeros(2, 3)
    _fill(straight, lambda target: ctypes.memmove(target, numbers.data_ptr(), 24))
    assert torch.equal(straight, whole)


def test_what_is_given_is_read_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is copied byte after byte."""
    here: Any = SimpleNamespace(rank=0, ranks=2, written_word=lambda source: 0)
    given, output = torch.arange(8.0).view(2, 4).t(), torch.zeros(2, 2)
    made = (
        ReduceScatter(here, output, given, SUM),
        AllGather(here, torch.zeros(8, 2), given),
        AllToAll(here, torch.zeros(4, 2), given),
    )
    for work in made:
        assert work.given[0].is_contiguous()
        assert torch.equal(work.given[0], given)


def test_calls_differ_where_sizes_or_operations_do() -> None:
    """What ranks compare, to see that they call alike."""
    here: Any = SimpleNamespace(rank=0, ranks=2, written_word=lambda source: 0)
    tensors = [torch.zeros(2), torch.zeros(3), torch.zeros(2)]
    works = [AllReduce(here, tensor, operation) for tensor, operation in zip(tensors, (SUM, SUM, MEAN), strict=True)]
    assert len({work.call for work in works}) == 3
    assert [work.call & (1 << 48) - 1 for work in works] == [8, 12, 8]


@pytest.mark.parametrize(("operation", "expected"), [(SUM, [4.0, 6.0]), (MEAN, [2.0, 3.0])])
def test_a_mean_is_divided_once(operation: int, expected: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    segment = SimpleNamespace(rows=lambda *given: asked.append(given) or rows)
    here: Any = SimpleNamespace(rank=0, ranks=2, written_word=lambda source: 0, segment=segment)
    work = AllReduce(here, torch.zeros(4), operation)
    work.start, work.row_size = 1000, 64
    assert work._combined(2, 2).tolist() == expected
    assert asked == [(torch.float32, 1008, 2, 64)]


def test_chunks_of_a_tensor_lie_in_the_rows_of_their_turn() -> None:
    """Rank r writes chunk c into row (c - r) modulo the ranks."""
    assert collectives._moves(4, 4, 2, 0) == ((0, 0, 8), (1, 8, 8))
    assert collectives._moves(4, 4, 2, 1) == ((1, 0, 8), (0, 8, 8))
    assert collectives._moves(1, 4, 2, 1) == ((1, 0, 4),)


def test_as_many_messages_wait_as_there_are_places(monkeypatch: pytest.MonkeyPatch) -> None:
    box: Any = object.__new__(Outgoing)
    places = [(100 + number, number) for number in range(MAIL_SLOTS)]
    words = [0] * (MAIL_SLOTS + 4)
    vars(box).update(
        segment=SimpleNamespace(words=words, address=0), taken=MAIL_SLOTS, _sent=MAIL_SLOTS + 1, _places=places
    )
    monkeypatch.setattr(mailbox.futex, "wake", lambda address: None)
    monkeypatch.setattr(mailbox.futex, "fence", lambda: None)
    copied: list[Any] = []
    monkeypatch.setattr(mailbox.ctypes, "memmove", lambda *given: copied.append(given))
    tensor = torch.ones(3)
    words[MAIL_SLOTS] = 5
    assert not box.write(5 + MAIL_SLOTS + 1, tensor), "the first of them is not read yet"
    assert copied == []
    assert box.write(5 + MAIL_SLOTS, tensor)
    place = (5 + MAIL_SLOTS) % MAIL_SLOTS
    assert copied == [(100 + place, tensor.data_ptr(), 12)]
    assert (words[place], words[MAIL_SLOTS + 1]) == (12, 5 + MAIL_SLOTS)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What goes through the shared memory of three ranks, in place of gloo."""
    made: list[str] = []
    here = SimpleNamespace(ranks=3, issue=lambda work, size: made.append(f"{work} of {size}"))
    monkeypatch.setattr(replaced, "_ends", lambda group, *tensors: SimpleNamespace(channel=here))
    monkeypatch.setattr(replaced, "LARGEST", 120)
    for name in ("AllReduce", "ReduceScatter", "AllToAll"):
        monkeypatch.setattr(collectives, name, lambda *_given, name=name: name)
    return made


def test_what_every_rank_reads_whole_must_fit_for_all(taken: list[str]) -> None:
    allreduce = replaced.all_reduce(lambda *_given: taken.append("gloo"))
    for length in (10, 11):
        allreduce("group", [torch.ones(length)], torch.distributed.AllreduceOptions())
    assert taken == ["AllReduce of 40", "gloo"]


def test_parts_that_are_not_equal_are_gloos(taken: list[str]) -> None:
    scatter = replaced.reduce_scatter(lambda *_given: taken.append("gloo"))
    exchange = replaced.all_to_all(lambda *_given: taken.append("gloo"))
    options = torch.distributed.ReduceScatterOptions()
    scatter("group", torch.ones(2), torch.ones(6), options)
    scatter("group", torch.ones(2), torch.ones(7), options)
    exchange("group", torch.ones(6, 2), torch.ones(6, 2), [], [], None)
    exchange("group", torch.ones(4, 3), torch.ones(4, 3), [], [], None)
    exchange("group", torch.ones(6, 2), torch.ones(6, 2), [1, 2, 3], [1, 2, 3], None)
    exchange("group", torch.ones(6, 2), torch.ones(6, 2), [], [1, 2, 3], None)
    exchange("group", torch.ones(9), torch.ones(6), [], [], None)
    assert taken == ["ReduceScatter of 24", "gloo", "AllToAll of 48", "gloo", "gloo", "gloo", "gloo"]


@pytest.mark.parametrize("given", [None, timedelta(0), timedelta(seconds=3)])
def test_no_time_limit_is_the_groups(given: timedelta | None) -> None:
    asked: list[Any] = []
    work = SharedWork("all_reduce", [], [])
    work.await_ready = asked.append  # pyright: ignore[reportAttributeAccessIssue]
    work.finish = lambda: None  # pyright: ignore[reportAttributeAccessIssue]
    assert work.complete(given)
    assert asked == [timedelta(seconds=3) if given else None]


@pytest.mark.parametrize(("ranks", "meets"), [(1, False), (2, True), (MOST_RANKS, True), (MOST_RANKS + 1, False)])
def test_ranks_of_one_machine_meet_in_its_memory(ranks: int, meets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the names that they have in the whole run, for those who are told of one."""
    file, watched = os.open(os.devnull, os.O_RDONLY), []
    said = iter([[f"machine|{100 + rank}|{file}" for rank in range(ranks)], ["-"] * ranks])
    for name, value in {
        "_create": lambda ranks: file,
        "_machine": lambda: "machine",
        "_exchange": lambda *_given: next(said),
        "_map": lambda process, file, ranks: (("segment", process, file), "-"),
    }.items():
        monkeypatch.setattr(meeting, name, value)
    monkeypatch.setattr(meeting.futex, "is_available", lambda: True)
    monkeypatch.setattr(meeting.peers, "watch", watched.append)
    names = [10 + rank for rank in range(ranks)]
    found = meeting.meet(NOTHING, 0, ranks, names)
    if not meets:
        os.close(file)
        assert found is None
        return
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(file)  # it is mapped, and needed no longer
    assert found is not None
    segment, members = found
    processes = tuple(range(100, 100 + ranks))
    assert segment == ("segment", 100, file)
    assert (members.rank, members.processes, members.names) == (0, processes, tuple(names))
    assert watched == [*processes]


def test_the_last_one_to_write_rings_the_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for all is woken once all are there; who waits for one rank, by that rank."""
    rung: list[int] = []
    monkeypatch.setattr(module.futex, "wake", rung.append)
    monkeypatch.setattr(module.futex, "full_fence", lambda: None)
    made, work = _channel(), _Work(9)
    work.source = -1
    words = made.segment.words
    words[2] = 8
    assert made._post(work, 0)
    assert (words[0], rung) == (0, [])
    words[2] = 9
    assert made._post(work, 0)
    assert (words[0], rung) == (9, [0])
    work.source = 1
    assert made._post(work, 0)
    assert rung == [0], "rank 1 is the one"
    work.source = 0
    assert made._post(work, 0)
    assert rung == [0, 8]


def test_nothing_overtakes_what_waits_for_a_slot() -> None:
    """Messages between two ranks are numbered in the order in which they are sent."""
    lock, written, there_is_room = threading.RLock(), list[int](), threading.Event()

    def write(number: int) -> bool:
        if there_is_room.is_set():
            written.append(number)
        return there_is_room.is_set()

    poster = Poster(lock)
    with lock:
        poster.post(lambda: write(1))
        there_is_room.set()
        poster.post(lambda: write(2))
    deadline = time.monotonic() + 10.0
    while len(written) < 2 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert written == [1, 2]


def test_only_what_has_been_sent_is_received_from_any_source() -> None:
    """Two messages have come, and both were asked for; the third comes later."""
    box: Any = object.__new__(Incoming)
    box._lock, box._issued, box.sent, box.segment = threading.RLock(), 2, 0, SimpleNamespace(words=[2])
    box.receive = lambda tensor: "the third"
    assert box.receive_if_sent(torch.zeros(1)) is None
    box.segment.words[0] = 3
    assert box.receive_if_sent(torch.zeros(1)) == "the third"
