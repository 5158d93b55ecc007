"""Waits through shared memory, and where things lie in it: what a rank that waits sees of the others. Clocks and
processes are stand-ins; tests/distributed/test_shared_memory.py has real ones."""

import itertools
import os
import pickle
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_ext.device.shared_memory.record as operations
from megatron_ext.device.shared_memory import any_source, meeting, peers, replaced, segment, waiting
from megatron_ext.device.shared_memory.any_source import MessageFromAnyone
from megatron_ext.device.shared_memory.meeting import Members
from megatron_ext.device.shared_memory.segment import LARGEST, MAIL_SLOTS, SLOTS, Layout, Segment
from megatron_ext.device.shared_memory.work import SharedWork
from tests.support.of_one_module import replace_in

MEMBERS = Members(rank=0, processes=(500, 501, 502), names=(4, 6, 8))


class Clock:
    """A clock that goes on by what is slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slept: float):
        self.now, self.slept, self.at = 100.0, slept, dict[float, Any]()
        for module in (waiting, any_source):
            replace_in(monkeypatch, module, "time", monotonic=lambda: self.now, sleep=lambda _seconds: self.sleep())
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
    calls = [layout.call(kind, slot, rank) for kind, slot in kinds for rank in range(ranks)]
    labels = [layout.label(source, target, slot) for source, target in pairs for slot in range(MAIL_SLOTS)]
    words = [*busy, *calls, *labels]
    assert len(set(words)) == len(words)
    assert calls == sorted(calls)
    spans = [(layout.slot(kind, slot), ranks * SLOTS[kind][0]) for kind, slot in kinds]
    spans += [(layout.message(source, target, slot), LARGEST) for source, target in pairs for slot in range(MAIL_SLOTS)]
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


@pytest.mark.parametrize(("value", "shared"), [(None, True), ("0", True), ("1", False)])
def test_a_rank_may_leave_its_groups_to_gloo(value: str | None, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(meeting.OFF, raising=False)
    if value is not None:
        monkeypatch.setenv(meeting.OFF, value)
    monkeypatch.setattr(meeting.futex, "is_available", lambda: True)
    monkeypatch.setattr(meeting.peers, "machine", lambda: "this one")
    assert meeting._machine() == ("this one" if shared else "")
    monkeypatch.setattr(meeting.futex, "is_available", lambda: False)
    assert meeting._machine() == ""


def test_containers_of_one_machine_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["pid:[1]", "pid:[2]"])
    replace_in(monkeypatch, peers, "os", readlink=lambda _path: next(names))
    first, second = peers.machine(), peers.machine()
    assert first != second
    assert first.rpartition(" ")[0] == second.rpartition(" ")[0]


class Store(dict[str, bytes]):
    """A store that another rank has written to."""

    def set(self, key: str, text: str) -> None:
        self[key] = text.encode()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self[key] for key in keys]


@pytest.mark.parametrize(
    ("machine", "said", "meets", "warned"),
    [("m", "-", True, None), ("other", "-", False, None), ("m", "no room", False, "no room")],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_ranks_tell_each_other_when_they_meet(
    rank: int,
    machine: str,
    said: str,
    meets: bool,
    warned: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Both are this process here, whose file they map; the first rank says why there is no shared memory."""
    file = os.memfd_create("test")
    os.ftruncate(file, Layout(2).size)
    monkeypatch.setattr(meeting, "_create", lambda _ranks: file)
    monkeypatch.setattr(meeting, "_machine", lambda: "m")
    monkeypatch.setattr(meeting.futex, "is_available", lambda: True)
    monkeypatch.setattr(meeting.peers, "watch", lambda _process: None)
    store, other, here = Store(), 1 - rank, os.getpid()
    store[f"shared-memory/{other}"] = f"{machine}|{here}|{-1 if other else file}".encode()
    store[f"shared-memory-mapped/{other}"] = said.encode()
    met = meeting.meet(store, rank, 2, [])
    assert (met is not None) == meets
    assert store[f"shared-memory/{rank}"] == f"m|{here}|{-1 if rank else file}".encode()
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == (
        [warned] if warned and rank == 0 else []
    )
    if met is not None:
        assert (met[1].rank, met[1].processes, met[1].names) == (rank, (here, here), (0, 1))
    if rank == 1:
        os.close(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.close(file)


def test_why_a_file_cannot_be_mapped() -> None:
    assert meeting._map(os.getpid(), -1, 2) == (None, "rank 0 could not create a file in memory")
    found, problem = meeting._map(os.getpid(), 10**6, 2)
    assert found is None
    assert "No such file" in problem


def test_operations_are_noted_as_torch_notes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of time among torch's, with what has ended."""
    monkeypatch.setattr(operations, "_entries", deque(maxlen=2))
    dump = pickle.dumps({"version": "x", "entries": [{"time_created_ns": 20, "of": "gloo"}]})
    assert operations.with_shared_memory(dump) == dump
    times = iter([5, 10, 30])
    replace_in(monkeypatch, operations, "time", time_ns=lambda: next(times))
    group = SimpleNamespace(group_desc="TP")
    of_group = operations.Record(_Referable(group), "3")
    of_group.begin("forgotten", 0, [])
    of_group.begin("all_reduce", 7, [torch.zeros(2, 3, dtype=torch.bfloat16)]).has_ended = True
    of_group.begin("send 0->1", 8, [torch.zeros(4)], is_message=True)
    found = pickle.loads(operations.with_shared_memory(dump))
    assert found["version"] == "x"
    assert [entry["time_created_ns"] for entry in found["entries"]] == [10, 20, 30]
    first, _, last = found["entries"]
    names = ("profiling_name", "collective_seq_id", "is_p2p", "input_sizes", "input_dtypes", "state", "retired")
    assert [first[name] for name in names] == [
        *("shared memory:all_reduce", 7, False, [[2, 3]], ["Bfloat16"], "completed", True)
    ]
    assert [last[name] for name in names] == [
        *("shared memory:send 0->1", 8, True, [[4]], ["Float32"], "scheduled", False)
    ]
    assert first["process_group"] == ("3 through shared memory", "undefined"), "the group has gone"


class _Referable:
    def __init__(self, group: Any):
        self.group_desc = group.group_desc


class _Trial(SharedWork):
    """Work that is ready from the second question on, or fails."""

    def __init__(self, *, fails: bool = False):
        super().__init__("all_reduce", [torch.ones(1)])
        self.asked, self.fails, self.read = 0, fails, 0

    def is_ready(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def await_ready(self, timeout: timedelta | None) -> None:
        if self.fails:
            raise RuntimeError("rank 1 was lost")

    def finish(self) -> None:
        self.read += 1
        self.end()


def test_what_torchs_callers_ask_of_a_work() -> None:
    work = _Trial()
    assert not work.is_completed()
    assert not work.is_success()
    assert work.is_completed()
    assert (work.is_success(), work.exception(), work.read) == (True, None, 1)
    assert work.complete()
    assert work.read == 1, "once"
    assert work.get_future().wait() == work.result()
    lost = _Trial(fails=True)
    with pytest.raises(RuntimeError, match="rank 1 was lost"):
        lost.synchronize()
    assert (lost.is_completed(), lost.is_success(), str(lost.exception())) == (True, False, "rank 1 was lost")
    with pytest.raises(RuntimeError, match="rank 1 was lost"):
        _Trial(fails=True).get_future().wait()


class Group:
    """Stands for torch's group."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Group:
    """A group of one rank."""
    group = Group()
    monkeypatch.setattr(replaced, "_of_one_rank", {id(group)})
    return group


def test_a_group_of_one_rank_copies(alone: Group) -> None:
    """Of every shape, as long as there are as many numbers; and asks gloo where torch would refuse."""
    to_gloo: list[str] = []

    def gloos(name: str) -> Any:
        return lambda *_given: to_gloo.append(name)

    given, output = torch.arange(6.0).view(2, 3), torch.zeros(6)
    gather = replaced.all_gather(gloos("gather"))
    assert gather(alone, output, given, None).is_success()
    assert output.tolist() == given.flatten().tolist()
    gather(alone, torch.zeros(7), given, None)
    scatter = replaced.reduce_scatter(gloos("scatter"))
    output = torch.zeros(3, 2)
    assert scatter(alone, output, given, torch.distributed.ReduceScatterOptions()).is_success()
    assert output.flatten().tolist() == given.flatten().tolist()
    options, broadcast = torch.distributed.BroadcastOptions(), replaced.broadcast(gloos("broadcast"))
    options.rootRank = 0
    assert broadcast(alone, [given], options).is_success()
    options.rootRank = 1
    broadcast(alone, [given], options)
    reduce, mean = replaced.all_reduce(gloos("reduce")), torch.distributed.AllreduceOptions()
    mean.reduceOp = torch.distributed.ReduceOp.AVG
    assert reduce(alone, [given], mean).is_success()
    reduce(alone, [torch.ones(2, dtype=torch.int64)], mean)
    with replaced.left_to_gloo():
        with replaced.left_to_gloo():
            reduce(alone, [given], mean)
        reduce(alone, [given], mean)
    assert reduce(alone, [given], mean).is_success()
    assert to_gloo == ["gather", "broadcast", *["reduce"] * 3]


def test_what_may_go_through_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    group, issued = Group(), list[str]()
    channel = SimpleNamespace(ranks=3, issue=lambda work, size: issued.append(f"{work} of {size}"))
    incoming = {1: SimpleNamespace(receive=lambda tensor: "from 1"), 2: None}
    ends = SimpleNamespace(
        channel=channel, incoming=incoming, outgoing={1: SimpleNamespace(send=lambda tensor: "to 1")}
    )
    monkeypatch.setattr(replaced, "_by_group", {id(group): ends})
    monkeypatch.setattr(replaced.collectives, "Barrier", lambda channel: "barrier")
    monkeypatch.setattr(replaced, "MessageFromAnyone", lambda boxes, tensor: "from anyone")
    barrier = replaced.barrier(lambda *_given: "gloo")
    barrier(group)
    assert issued == ["barrier of 0"]
    tensor = torch.ones(2)
    anyone = replaced.receive_from_anyone(lambda *_given: "gloo")
    sends, receives = replaced.send(lambda *_given: "gloo"), replaced.receive(lambda *_given: "gloo")
    assert [anyone(group, [tensor], tag) for tag in (0, 1)] == ["from anyone", "gloo"]
    assert [sends(group, [tensor], 1, tag) for tag in (0, 1)] == ["to 1", "gloo"]
    assert [receives(group, [tensor], 1, tag) for tag in (0, 1)] == ["from 1", "gloo"]
    large, empty = torch.zeros(LARGEST + 1, dtype=torch.uint8), torch.zeros(0)
    assert [sends(group, [one], 1, 0) for one in (large, large[:-1], empty)] == ["gloo", "to 1", "gloo"]
    assert sends(group, [tensor.to_sparse()], 1, 0) == "gloo"
    with replaced.left_to_gloo():
        assert (barrier(group), anyone(group, [tensor], 0), sends(group, [tensor], 1, 0)) == ("gloo",) * 3
    assert barrier(Group()) == "gloo"
