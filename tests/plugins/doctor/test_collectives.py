"""What is found of the links between ranks. tests/distributed/test_doctor_on_ranks.py has the ranks."""

import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.device.cpu import CpuDevice
from megatron_ext.errors import ConfigurationError, PeerLostError
from megatron_ext.plugins.doctor import attendance as attendance_module
from megatron_ext.plugins.doctor.attendance import Attendance
from megatron_ext.plugins.doctor.collectives import NotTheReporter, _Exercise, _failure, _report, check_collectives


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


def test_one_rank_alone_is_well_and_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert check_collectives("cpu", 20.0, 0.0) == []


Join = Callable[..., Attendance]
HERE = socket.gethostname()


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Lets a rank of three sign in, whose heart beats ten times as fast as a real one's."""
    monkeypatch.setattr(attendance_module, "_HEARTBEAT", 0.02)
    monkeypatch.setattr(attendance_module, "_SILENT_AFTER", 0.3)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    came: list[Attendance] = []

    def join(rank: int, ranks: int = 3, **changed: str) -> Attendance:
        launch = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
        launch |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"} | changed
        came.append(Attendance.open(launch, seconds=7.0))
        return came[-1]

    yield join
    for each in came:
        each.close()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_rank_0_holds_the_store_unless_torchruns_agent_does() -> None:
    launch = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    first = Attendance.open({**launch, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}, 5.0)
    second = Attendance.open({**launch, "RANK": "1"}, 5.0)
    second.enter("start")
    assert first.absent("start", seconds=0.0) == [0]
    for each in (second, first):
        each.close()
    nobodys = {**launch, "MASTER_PORT": free_port()}
    for rank, agents in (("0", "True"), ("1", "False")):
        with pytest.raises(PeerLostError, match=rf"^rank {rank} on .*: the store of rank 0 at 127.0.0.1:\d+ does not "):
            Attendance.open({**nobodys, "RANK": rank, "TORCHELASTIC_USE_AGENT_STORE": agents}, 0.3)


def test_signatures_of_an_earlier_attempt_are_not_seen(join: Join) -> None:
    """torchrun lends every start of the ranks the same store."""
    before = [join(rank) for rank in range(3)]
    for rank in before:
        rank.enter("start")
    assert before[0].absent("start") == []
    assert before[2].is_first_to_report()
    again = join(1, TORCHELASTIC_RESTART_COUNT="1")
    again.enter("start")
    assert again.absent("start", seconds=0.0) == [0, 2]
    assert again.names([0, 1]) == f"rank 0, rank 1 ({HERE})"
    assert again.is_first_to_report()


def test_who_has_not_signed_in_time_is_absent(join: Join) -> None:
    ranks = [join(rank) for rank in range(3)]
    ranks[0].enter("ring")
    ranks[2].enter("ring")
    ranks[2].leave("ring")
    began = time.monotonic()
    assert ranks[0].absent("ring", seconds=0.0) == [1]
    assert ranks[0].absent("ring", "out", seconds=0.0) == [0, 1]
    assert ranks[0].absent("barrier", seconds=0.0) == [0, 1, 2]
    assert time.monotonic() - began < 5.0, "0 is not the default"
    assert ranks[0].absent("ring", seconds=0.2) == [1]
    assert time.monotonic() - began >= 0.2
    inside = [ranks[1].is_inside("ring", each) for each in ([0], [1], [2], [1, 2], [2, 0])]
    assert inside == [True, False, False, False, True]
    ranks[1].enter("ring")
    assert ranks[0].absent("ring") == []


def test_who_is_silent_came_and_has_not_left(join: Join) -> None:
    ranks = [join(rank, ranks=4) for rank in range(3)]  # the fourth never comes
    assert ranks[0].silent() == []
    for stopped in (1, 2):
        ranks[stopped]._stop.set()  # as a process that is stopped: its heart no longer beats
    assert ranks[0].silent() == [1, 2]
    ranks[2].close()
    assert ranks[0].silent() == [1], "who signs off is not taken for dead"


def test_one_rank_reports(join: Join) -> None:
    ranks = [join(rank) for rank in range(3)]
    failures = [_failure(ranks[rank], "ring", "rank 2 did not get so far", ValueError("of\n torch")) for rank in (1, 0)]
    assert [type(failure) for failure in failures] == [PeerLostError, NotTheReporter]
    assert str(failures[0]) == (
        "ring: rank 2 did not get so far, within 7 s (of torch). Look at the output and the kernel's log of those "
        "ranks, and at the network between the machines: megatron-ext doctor without --collectives, on each of them."
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not set"),
        ({"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "node0"}, "MASTER_PORT is not set"),
    ],
)
def test_without_a_launcher_what_is_missing_is_named(given: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^--collectives needs ranks, but {text}; for example torchrun"):
        Attendance.open(given, 1.0)


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
def test_who_is_to_blame_for_a_stage_that_does_not_end(
    signed: dict[int, str], dead: list[int], said: str, join: Join
) -> None:
    ranks = [join(rank) for rank in range(3)]
    for rank, stage in signed.items():
        for passed in STAGES[: STAGES.index(stage)]:
            ranks[rank].enter(passed)
            ranks[rank].leave(passed)
        ranks[rank].enter(stage)
        if rank in dead:
            ranks[rank]._stop.set()
            time.sleep(0.1)  # for a beat that was under way
    part = _Exercise(ranks[0], CpuDevice(), 4)
    part._stage, part._stage_began = signed[0], time.monotonic() - 60.0
    assert str(part._diagnosis()).startswith(f"{said}, within 7 s. Look at".replace("(H)", f"({HERE})"))
