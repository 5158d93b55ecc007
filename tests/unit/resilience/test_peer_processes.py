"""How a process of this machine ended, whether it is stopped, and that another one of its id is not taken for it."""

import dataclasses
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.resilience.peer_processes import (
    PeerProcesses,
    ProcessName,
    end_stopped_ranks,
    exit_text,
    ranks_of_this_machine,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: pidfd and /proc")
TELLS_OF_COLLECTED = tuple(int(part) for part in platform.release().split(".")[:2]) >= (6, 15)


def name_of(process: subprocess.Popen[bytes]) -> ProcessName:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return dataclasses.replace(ProcessName.own(), pid=process.pid, start_time=int(fields[19]))


@pytest.fixture
def peers() -> Iterator[PeerProcesses]:
    watched = PeerProcesses()
    yield watched
    watched.close()


@pytest.mark.parametrize(
    "collected",
    [False, pytest.param(True, marks=pytest.mark.skipif(not TELLS_OF_COLLECTED, reason="needs Linux 6.15"))],
)
@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("exit 3", "ended with exit code 3"),
        ("exit 0", "ended with exit code 0"),
        ("kill -SEGV $$", "was killed by SIGSEGV"),
        ("kill -KILL $$", "was killed by SIGKILL"),
    ],
)
def test_how_a_process_ended(peers: PeerProcesses, command: str, text: str, collected: bool) -> None:
    process = subprocess.Popen(["sh", "-c", f"read line; {command}"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    peers.add(5, name_of(process))
    assert peers.ended(0.0) == {}
    process.stdin.close()
    if collected:
        process.wait()
    (rank,), (status,) = zip(*peers.ended(60.0).items(), strict=True)
    process.wait()
    assert (rank, exit_text(status)) == (5, text)
    assert peers.ended(0.0) == {}, "an end is told once"
    assert peers._poll.poll(0) == [], "nor is the next one waited for with its closed descriptor, which is always ready"


def test_a_stopped_process_is_seen_and_can_be_ended() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        name = name_of(process)
        assert not name.does_not_run
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while name.state() != "T":
            assert time.monotonic() < deadline
        assert name.does_not_run
        name.kill()
        while name.state() != "Z":
            assert time.monotonic() < deadline
        assert name.does_not_run, "nobody has collected it"
        assert process.wait(60) == -signal.SIGKILL
        assert name.state() is None
        assert name.does_not_run
    finally:
        process.kill()
        process.wait()


def test_a_process_of_another_start_or_machine_is_left_alone(peers: PeerProcesses) -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        name = name_of(process)
        for other in (
            dataclasses.replace(name, start_time=name.start_time + 1),
            dataclasses.replace(name, machine="another"),
        ):
            peers.add(0, other)
            other.kill()
        assert process.poll() is None
        process.kill()
        process.wait()
        assert peers.ended(0.0) == {}
    finally:
        process.kill()
        process.wait()


def test_a_wait_is_as_long_as_it_was_told(peers: PeerProcesses) -> None:
    began = time.monotonic()
    assert peers.ended(0.05) == {}
    assert time.monotonic() - began >= 0.05


def test_a_descriptor_ends_the_wait_early(peers: PeerProcesses) -> None:
    reader, writer = os.pipe()
    peers.also(reader)
    os.write(writer, b"x")
    began = time.monotonic()
    assert peers.ended(600.0) == {}
    assert time.monotonic() - began < 300.0
    os.close(reader)
    os.close(writer)


def test_a_name_survives_json() -> None:
    own = ProcessName.own()
    assert own.is_here
    assert own.state() == "R"
    assert ProcessName.from_json(own.as_json()) == own


def test_stopped_ranks_of_the_same_launch_are_ended_where_nobody_has_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun would wait half a minute for each."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run 7")
    told = [("1", "run 7"), ("2", "run 7"), ("3", "another run")]
    processes = [
        subprocess.Popen(["sleep", "60"], env={**os.environ, "RANK": rank, "TORCHELASTIC_RUN_ID": launch})
        for rank, launch in told
    ]
    try:
        for process in (processes[0], processes[2]):
            process.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 10
            while name_of(process).state() != "T":
                assert time.monotonic() < deadline
        said = f" Rank 1 was stopped, by SIGSTOP or a debugger (process {processes[0].pid})."
        assert end_stopped_ranks(os.getpid()) == said
        assert processes[0].wait(10) == -signal.SIGKILL
        assert [process.poll() for process in processes[1:]] == [None, None]
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        assert end_stopped_ranks(os.getpid()) == ""
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("rank", "world_size", "local", "number", "here"),
    [
        (5, 8, "1", "4", [4, 5, 6, 7]),
        (0, 8, "0", "4", [0, 1, 2, 3]),
        (4, 6, "0", "4", [4, 5]),  # a launch of which the layout leaves some over
        (1, 8, "3", "4", [0, 1]),
        (2, 3, None, None, [0, 1, 2]),
        (2, 3, "2", None, [0, 1, 2]),
        (2, 3, "x", "4", [0, 1, 2]),
    ],
)
def test_ranks_of_a_machine_follow_one_another(
    rank: int, world_size: int, local: str | None, number: str | None, here: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("LOCAL_RANK", local), ("LOCAL_WORLD_SIZE", number)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert ranks_of_this_machine(rank, world_size) == here


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (None, "has ended, nobody saw how"),
        (0, "ended with exit code 0"),
        (1 << 8, "ended with exit code 1"),
        (255 << 8, "ended with exit code 255"),
        (9, "was killed by SIGKILL"),
        (11 | 128, "was killed by SIGSEGV"),  # with a core dump
        (40, "was killed by signal 40"),
    ],
)
def test_the_status_of_an_end_in_words(status: int | None, text: str) -> None:
    assert exit_text(status) == text


def test_who_is_here_is_of_this_boot_and_its_start_is_known() -> None:
    own = ProcessName.own()
    assert (own.pid, own.is_here, own.state()) == (os.getpid(), True, "R")
    assert own.start_time > 0
    for other in ({"machine": "another"}, {"start_time": 0}):
        assert not dataclasses.replace(own, **other).is_here
    assert dataclasses.replace(own, start_time=own.start_time + 1).state() is None
