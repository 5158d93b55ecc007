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
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_ext.resilience import launcher_watch
from megatron_ext.resilience.peer_processes import (
    PeerProcesses,
    ProcessName,
    end_stopped_ranks,
    exit_text,
    ranks_of_this_machine,
)
from megatron_ext.resilience.process_end import RunStatus

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
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 60
        while name.state() != "T":
            assert time.monotonic() < deadline
        name.kill()
        assert process.wait(60) == -signal.SIGKILL
        assert name.state() is None
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


def test_a_killed_launcher_that_nobody_has_collected_is_gone() -> None:
    process = subprocess.Popen(["sleep", "60"])
    launcher = psutil.Process(process.pid)
    assert launcher_watch._lives(launcher)
    process.kill()
    deadline = time.monotonic() + 10.0
    while launcher.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.005)
    assert launcher.is_running(), "its name is still there"
    assert not launcher_watch._lives(launcher)
    process.wait()
    assert not launcher_watch._lives(launcher)


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


@pytest.mark.parametrize(
    ("state", "stands"), [("R", False), ("S", False), ("D", False), ("T", True), ("t", True), ("Z", True), (None, True)]
)
def test_a_process_that_does_not_run(state: str | None, stands: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`t` is one that a debugger has stopped."""
    monkeypatch.setattr(ProcessName, "state", lambda self: state)
    name = ProcessName(7, "node1", "boot", 5)
    assert name.does_not_run == stands


def test_who_is_here_is_of_this_boot_and_its_start_is_known() -> None:
    own = ProcessName.own()
    assert (own.pid, own.is_here, own.state()) == (os.getpid(), True, "R")
    assert own.start_time > 0
    for other in ({"machine": "another"}, {"start_time": 0}):
        assert not dataclasses.replace(own, **other).is_here
    assert dataclasses.replace(own, start_time=own.start_time + 1).state() is None


class Launched:
    """Stands for a process of psutil's; `above` are its ancestors, the nearest first."""

    def __init__(self, program: str | None, above: tuple["Launched", ...] = (), *, looks: int = 10**9):
        self.pid, self._program, self._above, self._looks = 4321, program, above, looks

    def exe(self) -> str:
        if self._program is None:
            raise psutil.AccessDenied
        return self._program

    def parents(self) -> tuple["Launched", ...]:
        return self._above

    def is_running(self) -> bool:
        self._looks -= 1
        return self._looks >= 0

    def status(self) -> str:
        return psutil.STATUS_RUNNING


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the threads watch, which do not run."""
    started: list[Any] = []

    def thread(target: Any, args: tuple[Any, ...], **_: Any) -> Any:
        return SimpleNamespace(start=lambda: started.append(args[0]))

    monkeypatch.setattr(launcher_watch.threading, "Thread", thread)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    return started


def test_torchrun_is_the_nearest_ancestor_that_runs_python(watched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shell, hidden = Launched("/bin/bash"), Launched(None)
    for program in ("/usr/bin/python3.12", "/opt/pypy3", "/env/bin/Python"):
        agent, outer = Launched(program), Launched("/usr/bin/python3")
        monkeypatch.setattr(psutil, "Process", lambda: Launched("", (shell, hidden, agent, outer)))  # noqa: B023
        launcher_watch.watch_launcher(RunStatus(rank=0))
        assert watched.pop() is agent
    monkeypatch.setattr(psutil, "Process", lambda: Launched("", (shell, Launched("/usr/bin/ipython-like"), hidden)))
    for parent, seen in ((77, []), (1, [None])):
        # An orphan's torchrun is gone already; another program may have set the variables.
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        launcher_watch.watch_launcher(RunStatus(rank=0))
        assert watched == seen


def test_only_ranks_of_torchrun_are_watched(watched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(psutil, "Process", lambda: Launched("", (Launched("/usr/bin/python3"),)))
    launcher_watch.watch_launcher(RunStatus(rank=0))
    assert watched == []


@pytest.mark.parametrize(
    ("agent", "iteration", "who", "where", "looks"),
    [
        (Launched("python", looks=3), 7, ", process 4321", "at iteration 7", 3),
        (Launched("python", looks=0), 0, ", process 4321", "at iteration 0", 0),
        (None, None, "", "before the first step", 0),
    ],
)
def test_a_rank_ends_when_its_launcher_is_gone(
    agent: Any, iteration: int | None, who: str, where: str, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Any] = []
    sleeps: list[float] = []
    monkeypatch.setattr(launcher_watch, "end_from_thread", lambda *given: ends.append(given))
    monkeypatch.setattr(launcher_watch, "time", SimpleNamespace(sleep=sleeps.append))
    status = RunStatus(rank=3, iteration=iteration)
    launcher_watch._watch(agent, status)
    [(text, code, of)] = ends
    assert (code, of, sleeps) == (76, status, [0.5] * looks)
    assert text.startswith(
        f"the launcher (torchrun{who}) is gone {where}, killed without a word to its ranks; nothing was"
    )
