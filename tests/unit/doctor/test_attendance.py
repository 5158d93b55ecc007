"""Who came to a check of the ranks, who is dead, and who says so: signatures in a store, without ranks."""

import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.doctor import attendance as attendance_module
from megatron_ext.doctor import collectives
from megatron_ext.doctor.attendance import Attendance
from megatron_ext.doctor.collectives import NotTheReporter, _Exercise, _failure, _report, check_collectives
from megatron_ext.errors import ConfigurationError, PeerLostError

LAUNCH = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "node0", "MASTER_PORT": "4000"}


class Meeting:
    """The store of a launch, to which ranks are connected; and the hearts, which beat when the test says so."""

    def __init__(self) -> None:
        self.store: Any = HashStore()
        self.connections: list[tuple[Any, ...]] = []
        self.sleeps: Callable[[], object] = lambda: None
        self.ranks: list[Attendance] = []

    def connect(self, host: str, port: int, *, is_master: bool, wait_for_workers: bool, timeout: timedelta) -> Any:
        self.connections.append((host, port, is_master, wait_for_workers, timeout.total_seconds()))
        return self.store

    def sleep(self, seconds: float) -> None:
        self.sleeps()

    def join(self, rank: int, **changed: str) -> Attendance:
        found = Attendance.open({**LAUNCH, "RANK": str(rank), **changed}, seconds=7.0)
        self.ranks.append(found)
        return found


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meeting]:
    found = Meeting()
    now = iter(range(10**6))
    clock = SimpleNamespace(monotonic=lambda: float(next(now)), sleep=found.sleep)
    monkeypatch.setattr(attendance_module, "time", clock)
    monkeypatch.setattr(attendance_module, "TCPStore", found.connect)
    monkeypatch.setattr(attendance_module, "_HEARTBEAT", 1000.0)
    yield found
    for rank in found.ranks:
        rank.close()


def test_rank_0_alone_holds_the_store_and_once(meeting: Meeting) -> None:
    meeting.join(0)
    meeting.join(1)
    given = ("node0", 4000)
    masters = [(*given, is_master, False, 7.0) for is_master in (True, False, False, False, False, False)]
    assert meeting.connections == masters
    meeting.connections.clear()
    meeting.join(0, TORCHELASTIC_USE_AGENT_STORE="True")
    assert [connection[2] for connection in meeting.connections] == [False] * 3, "torchrun's agent holds it"
    meeting.connections.clear()
    meeting.join(0, TORCHELASTIC_USE_AGENT_STORE="False")
    assert [connection[2] for connection in meeting.connections] == [True, False, False]


def test_signatures_of_an_earlier_attempt_are_not_seen(meeting: Meeting) -> None:
    """torchrun lends every start of the ranks the same store."""
    before = [meeting.join(rank) for rank in range(3)]
    for rank in before:
        rank.enter("start")
    assert before[0].absent("start") == []
    assert before[2].is_first_to_report()
    again = meeting.join(1, TORCHELASTIC_RESTART_COUNT="1")
    again.enter("start")
    assert again.absent("start") == [0, 2]
    assert again.names([0, 1]) == f"rank 0, rank 1 ({socket.gethostname()})"
    assert again.is_first_to_report()


def test_who_has_not_signed_is_absent(meeting: Meeting) -> None:
    ranks = [meeting.join(rank) for rank in range(3)]
    ranks[0].enter("ring")
    ranks[2].enter("ring")
    ranks[2].leave("ring")
    assert ranks[0].absent("ring", seconds=0.0) == [1]
    assert ranks[0].absent("ring", "out", seconds=0.0) == [0, 1]
    assert ranks[0].absent("barrier", seconds=0.0) == [0, 1, 2]
    looks: list[None] = []
    meeting.sleeps = lambda: looks.append(None)
    assert ranks[0].absent("ring") == [1]
    assert len(looks) == 7, "by default all of its seconds, one a look by this clock"
    looks.clear()
    assert ranks[0].absent("ring", seconds=0.0) == [1]
    assert looks == [], "0 is not the default"
    assert [ranks[1].is_inside("ring", each) for each in ([0], [1], [2], [1, 2], [2, 0])] == [
        True,
        False,
        False,
        False,
        True,
    ]
    meeting.sleeps = lambda: ranks[1].enter("ring")
    assert ranks[0].absent("ring") == [], "it comes while one waits for it"


def test_who_is_silent_came_and_has_not_left(meeting: Meeting) -> None:
    ranks = [meeting.join(rank, WORLD_SIZE="4") for rank in range(3)]  # the fourth never comes
    meeting.sleeps = lambda: ranks[0]._beats.add("beat/0", 1)  # rank 0 lives
    assert ranks[0].silent() == [1, 2]
    ranks[2].close()
    assert ranks[0].silent() == [1]


def test_a_heart_beats_until_its_rank_leaves(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendance_module, "_HEARTBEAT", 0.001)
    one, other = meeting.join(0), meeting.join(1)
    seen = one._beats.add("beat/1", 0)
    import time

    deadline = time.monotonic() + 20.0
    while one._beats.add("beat/1", 0) < seen + 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    other.close()
    time.sleep(0.02)
    seen = one._beats.add("beat/1", 0)
    time.sleep(0.02)
    assert one._beats.add("beat/1", 0) == seen


def test_one_rank_reports(meeting: Meeting) -> None:
    ranks = [meeting.join(rank) for rank in range(3)]
    failures = [_failure(ranks[rank], "ring", "rank 2 did not get so far", ValueError("of\n torch")) for rank in (1, 0)]
    assert [type(failure) for failure in failures] == [PeerLostError, NotTheReporter]
    assert str(failures[0]) == (
        "ring: rank 2 did not get so far, within 7 s (of torch). Look at the output and the kernel's log of those "
        "ranks, and at the network between the machines: tools/doctor.py without --collectives, on each of them."
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set"),
        ({name: LAUNCH[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}, "MASTER_PORT is not set"),
    ],
)
def test_without_a_launcher_what_is_missing_is_named(given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^--collectives needs ranks, but {text}; for example torchrun"):
        Attendance.open(given, 1.0)


def test_a_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("timed out")

    monkeypatch.setattr(attendance_module, "TCPStore", refuse)
    with pytest.raises(
        PeerLostError, match=r"^rank 2 on .*: the store of rank 0 at node0:4000 does not answer within 3 s"
    ):
        Attendance.open({**LAUNCH, "RANK": "2"}, 3.0)


def test_who_did_not_come_at_all_is_named(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**LAUNCH, "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    meeting.join(2).enter("start")
    with pytest.raises(PeerLostError, match=r"^start: rank 0 did not come, within 4 s"):
        check_collectives("cpu", 4.0, 1.0)
    assert meeting.ranks[0].silent() == [2], "this rank has signed off"


class Cpu:
    """A device without a backend behind it."""

    backend, kind, torch_device = "gloo", "cpu", torch.device("cpu")

    def bind_thread(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def exercise(rank: Attendance, size: int = 4_000_000) -> _Exercise:
    device: Any = Cpu()
    return _Exercise(rank, device, size)


@pytest.mark.parametrize(("total", "is_right"), [(6.0, True), (3.0, False), (7.0, False)])
def test_a_wrong_sum_is_told(total: float, is_right: bool, meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 + 2 + 3, to which rank 1 gives 2."""
    given: list[float] = []

    def all_reduce(tensor: torch.Tensor) -> None:
        given.append(tensor.item())
        tensor.fill_(total)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    part = exercise(meeting.join(1))
    if is_right:
        part._all_reduce()
    else:
        with pytest.raises(RuntimeError, match=rf"the all-reduce gave {total} instead of 6\.0"):
            part._all_reduce()
    assert given == [2.0]


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("brings", ["its number", "nothing", "another's"])
def test_the_ring_brings_the_number_of_the_rank_before(
    rank: int, brings: str, meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, after = (rank + 2) % 3, (rank + 1) % 3

    def run(operations: list[Any]) -> list[Any]:
        (sends, sent, to), (receives, got, of) = operations
        assert (sends, receives, to, of) == (dist.isend, dist.irecv, after, before)
        assert sent.tolist() == [float(rank)]
        if brings != "nothing":
            got.fill_(before if brings == "its number" else after)
        return []

    monkeypatch.setattr(dist, "P2POp", lambda *given: given)
    monkeypatch.setattr(dist, "batch_isend_irecv", run)
    part = exercise(meeting.join(rank))
    if brings == "its number":
        part._ring()
    else:
        wrong = -1.0 if brings == "nothing" else float(after)
        with pytest.raises(RuntimeError, match=rf"the ring brought {wrong} instead of {before}"):
            part._ring()


def test_speeds_are_bytes_a_second_of_the_quickest_of_three(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MB: 1,000,000 numbers. An all-reduce takes 8 ms at best, a message 2 ms: 2 GB/s."""
    now = 0.0
    rounds = {"all_reduce": iter((0.009, 0.008, 0.012)), "message": iter((0.002, 0.004, 0.003))}

    def takes(kind: str) -> None:
        nonlocal now
        now += next(rounds[kind])

    def gather(into: list[float], own: float) -> None:
        assert own == pytest.approx(2.0)
        into[:] = [2.0, 0.9, 2.4]

    part = exercise(meeting.join(0))
    for rank in (1, 2):
        meeting.join(rank)
    monkeypatch.setattr(collectives, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: takes("all_reduce"))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(part, "_pass_on", lambda count: takes("message") if count == 1_000_000 else None)
    part._bandwidth()
    host = socket.gethostname()
    assert [finding.text().splitlines()[0] for finding in part.findings] == [
        f"ok       3 ranks over gloo (3 on {host}): all-reduce, ring and barrier are right",
        f"warning  ring: 2.00 GB/s a link in the middle, slowest 0.90 from rank 0 ({host}) to rank 1 ({host})",
        "ok       all-reduce of 4 MB: 0.67 GB/s a rank, 2(d-1)/d x bytes / time",  # 2 x 2/3 x 4 MB in 8 ms
    ]


@pytest.mark.parametrize(
    ("hosts", "links", "level", "text"),
    [
        (
            ["a", "a", "a"],
            [1.0, 2.0, 3.0],
            "ok",
            "2.00 GB/s a link in the middle, slowest 1.00 from rank 2 (a) to rank 0 (a)",
        ),
        (
            ["a", "a", "a"],
            [2.0, 3.0, 0.9],
            "warning",
            "2.00 GB/s a link in the middle, slowest 0.90 from rank 1 (a) to rank 2 (a)",
        ),
        (
            ["a", "b", "b"],
            [2.0, 0.1, 3.0],
            "ok",
            "2.00 GB/s a link in the middle, slowest 0.10 from rank 0 (a) to rank 1 (b)",
        ),
    ],
)
def test_a_link_of_half_the_speed_is_named_within_a_machine(
    hosts: list[str], links: list[float], level: str, text: str
) -> None:
    came, ring = _report(hosts, "gloo", links)
    assert came.what.startswith("3 ranks over gloo (")
    assert ("1 on a, 2 on b" in came.what) == ("b" in hosts)
    assert (ring.level, ring.what) == (level, f"ring: {text}")


STAGES = ("process group", "all-reduce", "ring", "barrier", "bandwidth")


@pytest.mark.parametrize(
    ("signed", "dead", "said"),
    [
        # Rank 2 has signed for the ring as all have, and not after it: nobody is dead.
        (
            {0: "ring", 1: "ring", 2: "ring"},
            [],
            "ring: all ranks are there, but rank 0 (H), rank 1 (H), rank 2 (H) cannot exchange data",
        ),
        ({0: "ring", 1: "ring", 2: "all-reduce"}, [], "ring: rank 2 (H) did not get so far"),
        ({0: "ring", 1: "ring", 2: "all-reduce"}, [2], "all-reduce: rank 2 (H) came and no longer answers"),
        ({0: "ring", 1: "barrier", 2: "ring"}, [1], "barrier: rank 1 (H) came and no longer answers"),
    ],
)
def test_who_is_to_blame(signed: dict[int, str], dead: list[int], said: str, meeting: Meeting) -> None:
    ranks = [meeting.join(rank) for rank in range(3)]
    for rank, stage in signed.items():
        for passed in STAGES[: STAGES.index(stage)]:
            ranks[rank].enter(passed)
            ranks[rank].leave(passed)
        ranks[rank].enter(stage)
    meeting.sleeps = lambda: [ranks[0]._beats.add(f"beat/{rank}", 1) for rank in range(3) if rank not in dead]
    part = exercise(ranks[0])
    part._stage = signed[0]
    failure = part._diagnosis()
    assert str(failure).startswith(f"{said}, within 7 s. Look at".replace("(H)", f"({socket.gethostname()})"))


def test_stages_are_signed_before_and_after_and_an_error_in_one_is_judged(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = meeting.join(0, WORLD_SIZE="1")
    monkeypatch.setattr(dist, "barrier", lambda: None)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    for name in ("_start", "_all_reduce", "_ring", "_bandwidth"):
        monkeypatch.setattr(_Exercise, name, lambda self: None)
    exercise(rank).watch()
    assert [rank.absent(stage, kind, seconds=0.0) for stage in STAGES for kind in ("in", "out")] == [[]] * 10

    def fail(self: _Exercise) -> None:
        raise RuntimeError("no route to host")

    again = meeting.join(0, WORLD_SIZE="1", TORCHELASTIC_RESTART_COUNT="1")
    meeting.sleeps = lambda: again._beats.add("beat/0", 1)
    monkeypatch.setattr(_Exercise, "_ring", fail)
    with pytest.raises(PeerLostError, match=r"^ring: all ranks are there, but rank 0 .*\(no route to host\)"):
        exercise(again).watch()


def test_a_size_is_in_millions_of_bytes(meeting: Meeting, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    for name, value in {**LAUNCH, "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    device: Any = Cpu()
    monkeypatch.setattr(collectives, "device", SimpleNamespace(install=lambda kind, engine: device))
    monkeypatch.setattr(_Exercise, "watch", lambda self: sizes.append(self._size))
    for megabytes in (2.5, 0.0):
        assert check_collectives("cpu", 4.0, megabytes) == []
    assert sizes == [2_500_000, 4]
