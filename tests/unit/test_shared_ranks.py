"""Collectives and messages through shared memory among ranks that are all in this process: issuing never waits, so that
one thread can be every rank. tests/distributed/test_shared_memory.py has processes."""

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from megatron_ext.device.shared_memory import collectives
from megatron_ext.device.shared_memory.channel import Channel
from megatron_ext.device.shared_memory.mailbox import Incoming, Outgoing
from megatron_ext.device.shared_memory.meeting import Members
from megatron_ext.device.shared_memory.record import Record
from megatron_ext.device.shared_memory.ring_order import _NUMBERS
from megatron_ext.device.shared_memory.segment import MAIL_SLOTS, SLOTS, Layout, Segment

RANKS = 3


class Group:
    """Stands for torch's group."""


@pytest.fixture
def channels() -> Iterator[list[Channel]]:
    """Each rank's end of one memory; in the world they are ranks 10, 11 and 12."""
    file, group = os.memfd_create("test"), Group()
    os.ftruncate(file, Layout(RANKS).size)
    here = os.getpid()

    def end(rank: int) -> Channel:
        members = Members(rank, (here,) * RANKS, (10, 11, 12))
        return Channel(Segment(file, RANKS), members, lambda: timedelta(seconds=1), Record(group, "0"))

    yield [end(rank) for rank in range(RANKS)]
    os.close(file)


def _all(channels: list[Channel], make: Callable[[Channel, int], Any], order: tuple[int, ...] = (2, 0, 1)) -> None:
    """Issue on every rank, then wait on every rank."""
    works = {rank: make(channels[rank], rank) for rank in order}
    for rank in order:
        channels[rank].issue(works[rank], works[rank].call & (1 << 48) - 1)
    for rank in range(RANKS):
        assert works[rank].complete()


def _given(count: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Small whole numbers, whose sums are exact."""
    return [((torch.arange(count) * (rank + 2)) % 7 - rank).to(dtype) for rank in range(RANKS)]


REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda whole: whole.sum(0),
    "MAX": lambda whole: whole.amax(0),
    "MIN": lambda whole: whole.amin(0),
    "AVG": lambda whole: whole.sum(0) / RANKS,
}


@pytest.mark.parametrize("name", REDUCED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("count", [1, 7, SLOTS[0][0] // 8 + 1])
def test_reductions_are_those_of_all_ranks(count: int, dtype: torch.dtype, name: str, channels: list[Channel]) -> None:
    if name == "AVG" and not dtype.is_floating_point:
        return
    given, operation = _given(count, dtype), _NUMBERS[name]
    whole = torch.stack(given).double() if dtype.is_floating_point else torch.stack(given)
    _all(channels, lambda at, rank: collectives.AllReduce(at, given[rank], operation))
    for tensor in given:
        assert torch.equal(tensor, REDUCED[name](whole).to(dtype))


@pytest.mark.parametrize("count", [1, 5, 4000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_each_rank_gets_its_part(dtype: torch.dtype, count: int, channels: list[Channel]) -> None:
    given = _given(RANKS * count, dtype)
    outputs = [torch.zeros(count, dtype=dtype) for _ in range(RANKS)]
    _all(channels, lambda at, rank: collectives.ReduceScatter(at, outputs[rank], given[rank], _NUMBERS["SUM"]))
    assert torch.equal(torch.cat(outputs), torch.stack(given).sum(0).to(dtype))
    gathered = [torch.zeros(RANKS, RANKS * count, dtype=dtype) for _ in range(RANKS)]
    _all(channels, lambda at, rank: collectives.AllGather(at, gathered[rank], given[rank]))
    lists = [[torch.zeros(RANKS * count, dtype=dtype) for _ in range(RANKS)] for _ in range(RANKS)]
    _all(channels, lambda at, rank: collectives.AllGatherList(at, lists[rank], given[rank]))
    exchanged = [torch.zeros(RANKS * count, dtype=dtype) for _ in range(RANKS)]
    _all(channels, lambda at, rank: collectives.AllToAll(at, exchanged[rank], given[rank]))
    for rank in range(RANKS):
        assert torch.equal(gathered[rank], torch.stack(given))
        assert all(map(torch.equal, lists[rank], given))
        assert torch.equal(exchanged[rank], torch.cat([one.chunk(RANKS)[rank] for one in given]))


@pytest.mark.parametrize("root", range(RANKS))
def test_a_broadcast_is_the_roots_to_say(root: int, channels: list[Channel]) -> None:
    """Which waits for nobody, and calls the others' sizes none of its business until they read."""
    given = _given(5)
    expected = given[root].clone()
    works = [collectives.Broadcast(channels[rank], given[rank], root) for rank in range(RANKS)]
    channels[root].issue(works[root], given[root].nbytes)
    assert works[root].complete()
    for rank in range(RANKS):
        if rank != root:
            channels[rank].issue(works[rank], given[rank].nbytes)
            assert works[rank].complete()
        assert torch.equal(given[rank], expected)


def test_many_collectives_are_issued_before_any_is_read(channels: list[Channel]) -> None:
    """More than there are slots: those for which there is none are written when the others have been read."""
    count = SLOTS[0][1] + 5
    given = [[torch.full((2,), float(number + rank)) for number in range(count)] for rank in range(RANKS)]
    works = [
        [
            channels[rank].issue(collectives.AllReduce(channels[rank], tensor, _NUMBERS["SUM"]), tensor.nbytes)
            for tensor in given[rank]
        ]
        for rank in range(RANKS)
    ]
    for number in reversed(range(count)):
        for rank in range(RANKS):
            assert works[rank][number].complete()
            assert given[rank][number].tolist() == [3.0 * number + 3.0] * 2
    _all(channels, lambda channel, _rank: collectives.Barrier(channel))


def test_who_calls_something_else_is_named(channels: list[Channel]) -> None:
    works: list[Any] = [
        collectives.AllReduce(channels[0], torch.zeros(2), _NUMBERS["SUM"]),
        collectives.AllReduce(channels[1], torch.zeros(2), _NUMBERS["SUM"]),
        collectives.AllReduce(channels[2], torch.zeros(3), _NUMBERS["SUM"]),
    ]
    for channel, work in zip(channels, works, strict=True):
        channel.issue(work, 8)
    code = collectives.ALL_REDUCE + _NUMBERS["SUM"]
    with pytest.raises(RuntimeError) as error:
        works[0].complete()
    assert str(error.value) == (
        f"all_reduce: rank 10 gives 8 bytes (call {code}), and rank 12 12 bytes (call {code}): all ranks of a group "
        "must call the same collectives in the same order, with equal sizes"
    )


def test_who_has_not_come_is_named(channels: list[Channel]) -> None:
    work = collectives.Barrier(channels[1])
    channels[1].issue(work, 0)
    assert channels[1].absent(1, -1) == [0, 2]
    assert (channels[1].absent(1, 2), channels[1].absent(1, 1)) == ([2], [])
    with pytest.raises(RuntimeError, match=r"Timed out waiting 100ms in barrier .*: rank 10 .*, rank 12 .* not come"):
        work.complete(timedelta(milliseconds=100))


def _boxes(channels: list[Channel], source: int, target: int) -> tuple[Outgoing, Incoming]:
    record = Record(Group(), "0")
    return Outgoing(channels[source], target, record), Incoming(channels[target], source, record)


def test_messages_come_in_their_order_whoever_waits_first(channels: list[Channel]) -> None:
    """More than may wait to be read; those to others are apart."""
    outgoing, incoming = _boxes(channels, 0, 2)
    back_out, back_in = _boxes(channels, 2, 0)
    count = MAIL_SLOTS + 3
    sent = [outgoing.send(torch.full((2,), float(number))) for number in range(count)]
    assert [work.is_completed() for work in sent] == [True] * MAIL_SLOTS + [False] * 3
    assert back_out.send(torch.tensor([7.0, 8.0])).complete()
    received = [torch.zeros(2) for _ in range(count)]
    works = [incoming.receive(tensor) for tensor in received]
    assert not works[-1].is_ready()
    assert works[1].complete()
    assert [tensor.tolist() for tensor in received[:3]] == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]
    assert works[-1].complete()
    assert [tensor.tolist() for tensor in received] == [[float(number)] * 2 for number in range(count)]
    assert all(work.complete() for work in (*sent, *works))
    assert {work.source_rank() for work in works} == {0}
    answer = torch.zeros(2)
    work = back_in.receive(answer)
    assert work.complete()
    assert (answer.tolist(), work.source_rank()) == ([7.0, 8.0], 2)
    with pytest.raises(RuntimeError, match="Timed out waiting 50ms in recv 0<-2"):
        back_in.receive(answer).complete(timedelta(milliseconds=50))


@pytest.mark.parametrize("room", [1, 3])
def test_a_message_of_another_size_is_refused(room: int, channels: list[Channel]) -> None:
    outgoing, incoming = _boxes(channels, 1, 2)
    assert outgoing.send(torch.ones(2)).complete()
    with pytest.raises(RuntimeError, match=rf"recv 2<-1: {4 * room} bytes are expected, and 8 were sent"):
        incoming.receive(torch.zeros(room)).complete()
