"""What goes through shared memory has gloo's bits, never waits where gloo would not, and sees a rank that is lost."""

import os
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ext import device
from megatron_ext.device.shared_memory import collectives, meeting, peers, replaced
from megatron_ext.device.shared_memory.channel import Channel
from megatron_ext.device.shared_memory.mailbox import Incoming, Outgoing
from megatron_ext.device.shared_memory.meeting import Members
from megatron_ext.device.shared_memory.record import Record
from megatron_ext.device.shared_memory.segment import LARGEST, MAIL_SLOTS, Layout, Segment
from megatron_ext.resilience.process_end import is_lost_peer
from megatron_ext.verify.ranks import run_ranks
from tests.support.checkpoints import FLAGS
from tests.support.program import Ended, run_program

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool)
SIZES = (1, 2, 3, 7, 8, 9, 31, 64, 1001, 4099, 70_000)
FEW_SIZES = (1, 9, 1001)
SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0)


def _start() -> tuple[int, int]:
    device.install("cpu")
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def _calls(x: torch.Tensor, rank: int, ranks: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Return each operation, as a function that returns its result for this rank's tensor."""

    def reduced(operation: Any) -> torch.Tensor:
        result = x.clone()
        dist.all_reduce(result, operation)
        return result

    def scattered(operation: Any) -> torch.Tensor:
        result = torch.empty_like(x)
        dist.reduce_scatter_tensor(result, torch.cat([x] * ranks), operation)
        return result

    def coalesced_sum() -> torch.Tensor:
        result = x.clone()
        with dist._coalescing_manager(async_ops=True) as works:  # pyright: ignore
            dist.all_reduce(result)
        works.wait()
        return result

    def coalesced_part() -> torch.Tensor:
        part = torch.empty_like(x)
        with dist._coalescing_manager(async_ops=True) as works:  # pyright: ignore
            dist.reduce_scatter_tensor(part, torch.cat([x] * ranks))
        works.wait()
        return part

    def gathered() -> torch.Tensor:
        result = x.new_empty(ranks * x.numel())
        dist.all_gather_into_tensor(result, x)
        return result

    def gathered_in_columns() -> torch.Tensor:
        results = [x.new_empty(x.numel(), 2)[:, 0] for _ in range(ranks)]
        dist.all_gather(results, x)
        return torch.cat(results)

    def exchanged() -> torch.Tensor:
        result = x.new_empty(ranks * x.numel())
        dist.all_to_all_single(result, (x.repeat(ranks).view(ranks, -1).t().contiguous().view(-1)))
        return result

    def copied() -> torch.Tensor:
        result = x.clone()
        dist.broadcast(result, ranks - 1)
        return result

    def passed_on() -> torch.Tensor:
        result = torch.empty_like(x)
        works = [dist.isend(x, (rank + 1) % ranks), dist.irecv(result, (rank - 1) % ranks)]
        for work in works:
            assert work is not None
            work.wait()
        return result

    operations = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    if x.dtype in FLOATS:
        operations["mean"] = dist.ReduceOp.AVG
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    for name, operation in operations.items():
        calls[f"all-reduce {name}"] = lambda operation=operation: reduced(operation)
        calls[f"reduce-scatter {name}"] = lambda operation=operation: scattered(operation)
    return calls | {
        "coalesced all-reduce": coalesced_sum,
        "coalesced reduce-scatter": coalesced_part,
        "all-gather": gathered,
        "all-gather of a list": gathered_in_columns,
        "all-to-all": exchanged,
        "broadcast": copied,
        "message": passed_on,
    }


def _tensors(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    pairs = [(dtype, size) for dtype in DTYPES for size in (SIZES if dtype is torch.float32 else FEW_SIZES)]
    found = [(5 * torch.randn(size, generator=generator, dtype=torch.float64)).to(dtype) for dtype, size in pairs]
    special = torch.tensor(SPECIAL).repeat_interleave(6) if rank % 2 else torch.tensor(SPECIAL).repeat(6)
    return [*found, *(special.to(dtype) for dtype in FLOATS)]


def _compare_with_gloo() -> tuple[list[str], int]:
    """Return what differs, and how many operations went through shared memory."""
    rank, ranks = _start()
    different, count = [], 0
    for x in _tensors(rank):
        for name, call in _calls(x, rank, ranks).items():
            ours = call()
            with replaced.left_to_gloo():
                theirs = call()
            if not _is_same(ours, theirs):
                different.append(f"{name} of {x.numel()} {x.dtype}")
    for ends in replaced._by_group.values():
        count += ends.channel._number
    return different, count


def _is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether all bits are equal, those of a NaN aside."""
    both = ours.isnan() & theirs.isnan() if ours.is_floating_point() else torch.zeros_like(ours, dtype=torch.bool)
    return torch.equal(ours[~both].view(torch.uint8), theirs[~both].view(torch.uint8))


# torch 2.11 makes gloo's groups in no function of its own, so that there is no place to join them: all goes over gloo.
needs_place_to_join = pytest.mark.skipif(
    not hasattr(torch.distributed.distributed_c10d, "_create_gloo_process_group"),
    reason="all is gloo's",
)


@needs_place_to_join
@pytest.mark.parametrize("ranks", [4, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (2, 3, 8))])
def test_bits_are_gloos(ranks: int) -> None:
    for different, count in run_ranks(ranks, _compare_with_gloo):
        assert not different
        assert count > 300


def _compare_one_rank_with_gloo() -> tuple[list[str], set[str]]:
    """Return what differs, and the operations that gloo was not asked for."""
    rank, ranks = _start()
    different, done_here = [], set()
    begun: list[str] = []

    class Counted(replaced._Alone):
        def __init__(self, name: str, output: torch.Tensor, given: torch.Tensor) -> None:
            super().__init__(name, output, given)
            begun.append(name)

    replaced._Alone = Counted  # in a process of its own
    for x in _tensors(rank):
        for name, call in _calls(x, rank, ranks).items():
            if name == "message":  # gloo sends none to oneself
                continue
            begun.clear()
            ours = call()
            done_here |= {name} if begun else set()
            with replaced.left_to_gloo():
                theirs = call()
            if not _is_same(ours, theirs):
                different.append(f"{name} of {x.numel()} {x.dtype}")
    return different, done_here


@needs_place_to_join
def test_a_group_of_one_rank_needs_no_gloo() -> None:
    [(different, done_here)] = run_ranks(1, _compare_one_rank_with_gloo)
    assert not different
    reductions = {
        f"{kind} {name}" for kind in ("all-reduce", "reduce-scatter") for name in ("sum", "max", "min", "mean")
    }
    coalesced = {"coalesced all-reduce", "coalesced reduce-scatter"}
    assert done_here == {*reductions, *coalesced, "all-gather", "broadcast"}


def _have_many_under_way() -> list[str]:
    """Issue far more than there are slots, and wait for the last one first."""
    rank, ranks = _start()
    wrong = []
    sizes = [size for _ in range(30) for size in (1, 5000, LARGEST // 8)]
    tensors = [torch.full((size,), float(number)) for number, size in enumerate(sizes)]
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works[3:5]]
    for work in reversed(works):
        work.wait()
    for number, tensor in enumerate(tensors):
        if not bool((tensor == ranks * number).all()):
            wrong.append(f"sum {number}")
    if [future.wait()[0] is tensor for future, tensor in zip(futures, tensors[3:5], strict=True)] != [True, True]:
        wrong.append("futures")
    messages = [torch.full((size,), float(rank)) for size in sizes[: 4 * MAIL_SLOTS]]
    results = [torch.empty_like(message) for message in messages]
    sends: list[Any] = [dist.isend(message, (rank + 1) % ranks) for message in messages]
    receives: list[Any] = [dist.irecv(result, (rank - 1) % ranks) for result in results]
    for work in [*reversed(receives), *sends]:
        work.wait()
    wrong += [f"message {n}" for n, result in enumerate(results) if not bool((result == (rank - 1) % ranks).all())]
    dist.barrier()
    if not works[0].is_completed() or works[0].result()[0] is not tensors[0]:
        wrong.append("result")
    return wrong


def test_more_than_there_are_slots_is_issued_without_waiting() -> None:
    assert run_ranks(2, _have_many_under_way) == [[], []]


def _hear_from_anyone() -> list[tuple[int, int]]:
    """Return, on rank 0, who sent each message and what it said; the last one is asked of rank 1 by name."""
    rank, ranks = _start()
    if rank:
        for count in range(3):
            dist.send(torch.tensor([10 * rank + count]), 0)
        return []
    heard = []
    for number in range(3 * (ranks - 1)):
        message = torch.zeros(1, dtype=torch.int64)
        is_last = number == 3 * (ranks - 1) - 1
        late = next((sender for sender in range(1, ranks) if [said[0] for said in heard].count(sender) < 3), None)
        heard.append((dist.recv(message, late if is_last else None), int(message)))
    return heard


def test_a_message_from_anyone_says_who_sent_it() -> None:
    heard = run_ranks(3, _hear_from_anyone)[0]
    for sender in (1, 2):
        assert [message for source, message in heard if source == sender] == [10 * sender + n for n in range(3)]


def _meet_as(machines: list[str], unmapped: int) -> tuple[int, float]:
    """Return the number of groups that share memory, and a sum over ranks."""
    device.install("cpu")
    rank = int(os.environ["RANK"])
    peers.machine = lambda: machines[rank]
    if machines[rank] == "off":
        os.environ[meeting.OFF] = "1"
    if rank == unmapped:
        meeting._map = lambda *_: (None, "no permission")
    dist.init_process_group("gloo")
    total = torch.ones(3)
    dist.all_reduce(total)
    return len(replaced._by_group), float(total.sum())


@needs_place_to_join
@pytest.mark.parametrize(
    ("machines", "unmapped", "groups"),
    [(["a", "a"], -1, 1), (["a", "b"], -1, 0), (["a", "off"], -1, 0), (["a", "a"], 1, 0)],
)
def test_all_ranks_agree_whether_memory_is_shared(machines: list[str], unmapped: int, groups: int) -> None:
    assert run_ranks(2, _meet_as, machines, unmapped) == [(groups, 6.0)] * 2


class Pair:
    """A group of this process and a child, which runs a function."""

    def __init__(self, child: Callable[["Pair"], None], timeout: float = 60.0):
        file = os.memfd_create("test")
        os.ftruncate(file, Layout(2).size)
        self._timeout, self._group = timedelta(seconds=timeout), torch.nn.Identity()
        self._segment = Segment(file, 2)
        parent = os.getpid()
        self.child = os.fork()
        if not self.child:
            try:
                self._join(1, (parent, os.getpid()))
                child(self)
            finally:
                os._exit(0)
        self._join(0, (parent, self.child))
        os.close(file)

    def _join(self, rank: int, processes: tuple[int, int]) -> None:
        record = Record(self._group, "test")
        members = Members(rank, processes, (0, 1))
        self.channel = Channel(self._segment, members, lambda: self._timeout, record)
        self.outgoing = Outgoing(self.channel, 1 - rank, record)
        self.incoming = Incoming(self.channel, 1 - rank, record)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        work = collectives.AllReduce(self.channel, tensor, 0)
        self.channel.issue(work, tensor.nbytes).complete()

    def end(self) -> None:
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        for poster in (self.channel._poster, self.outgoing._poster):
            with poster._lock:
                poster._waiting.clear()  # whose thread would go on looking for a free slot


def _come_once_and_leave(pair: Pair) -> None:
    pair.all_reduce(torch.ones(4))
    pair.outgoing.send(torch.ones(4))


def test_a_lost_rank_is_seen_at_once_but_what_it_gave_is_read() -> None:
    pair = Pair(_come_once_and_leave)
    total, got = torch.ones(4), torch.zeros(4)
    pair.all_reduce(total)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match=r"closed by peer: rank 1 \(process \d+\) ended before all_reduce") as lost:
        pair.all_reduce(torch.ones(4))
    assert time.monotonic() - begun < 30.0, "half of what the group would wait"
    assert is_lost_peer(lost.value)
    pair.incoming.receive(got).complete()
    assert total.tolist() == [2.0] * 4
    assert got.tolist() == [1.0] * 4
    with pytest.raises(RuntimeError, match=r"closed by peer: rank 1 .* ended before recv 0<-1"):
        pair.incoming.receive(got).complete()
    for _ in range(MAIL_SLOTS):
        assert pair.outgoing.send(got).complete()
    with pytest.raises(RuntimeError, match=r"closed by peer: rank 1 .* ended before send 0->1"):
        pair.outgoing.send(got).complete()
    pair.end()


def test_the_groups_timeout_holds() -> None:
    pair = Pair(lambda _: time.sleep(60), timeout=0.3)
    with pytest.raises(RuntimeError, match=r"Timed out waiting 300ms in all_reduce .*: rank 1 .* did not come") as late:
        pair.all_reduce(torch.ones(4))
    assert is_lost_peer(late.value)
    pair.end()


def test_ranks_that_call_different_things_are_told() -> None:
    pair = Pair(lambda pair: pair.all_reduce(torch.ones(5)))
    with pytest.raises(RuntimeError, match=r"all_reduce: rank 0 gives 16 bytes .*, and rank 1 20 "):
        pair.all_reduce(torch.ones(4))
    pair.end()


def test_a_rank_waits_without_the_interpreter() -> None:
    """A signal's handler runs while a rank waits."""
    pair = Pair(lambda _: time.sleep(60))
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: (seen.append(1), pair.end()))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(RuntimeError, match="closed by peer"):
            pair.all_reduce(torch.ones(4))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [1]


def _without_files_in_memory(argv: list[str]) -> Ended:
    """The program, where no file may have as many bytes as the ranks of a group share."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    return run_program(argv)


def test_what_concerns_every_group_is_said_once() -> None:
    """Groups of all ranks, of tensor and of data parallelism, and others, each with a rank 0 of its own."""
    ranks = run_ranks(4, _without_files_in_memory, [*FLAGS, "--tensor-model-parallel-size", "2", "--train-iters", "1"])
    assert [ended.code for ended in ranks] == [0] * 4, [ended.errors for ended in ranks]
    said = [line for ended in ranks for line in (ended.output + ended.errors).splitlines() if "gloo alone" in line]
    assert said == [
        "CPU ranks talk over gloo alone, not through shared memory: rank 0 could not create a file in memory"
    ]


def test_why_a_memory_cannot_be_mapped_is_the_same_text_for_every_group() -> None:
    """Process and file are another one's for each: here of processes that are not there."""
    texts = set()
    for process in (2**22 + 1, 2**22 + 2):
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        store.set("shared-memory/0", f"{peers.machine()}|{process}|7")
        store.set("shared-memory-mapped/0", "-")
        assert meeting.meet(store, 1, 2, []) is None
        texts.add(store.get("shared-memory-mapped/1").decode())
    assert texts == {"No such file or directory"}
