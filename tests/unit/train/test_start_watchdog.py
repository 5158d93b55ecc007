"""What a rank marks of where it is: which collective of which group, which wait of which thread, and its progress."""

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d

from megatron_ext.config.schema import LayoutConfig
from megatron_ext.parallel.operations import COLLECTIVES, END_OF_BATCH, MESSAGES
from megatron_ext.resilience import progress
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.resilience.progress import LOADER, Progress, Wait
from megatron_ext.train import start_watchdog
from megatron_ext.train.start_watchdog import OperationMarks


class Work:
    during: Any = staticmethod(lambda: None)

    def wait(self) -> str:
        self.during()
        return "waited"


class Group:
    """Stands for torch's class."""

    during: Any = staticmethod(lambda: None)

    def __init__(self, name: str):
        self.group_name = name


def run(group: Group, *given: Any, **named: Any) -> Work | None:
    group.during()
    return Work() if group.group_name != "without work" else None


for _name in (*MESSAGES, *COLLECTIVES, END_OF_BATCH):
    setattr(Group, _name, run)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Progress]:
    """The progress of this process, whose collectives are marked."""
    clock = Clock()
    for module in (start_watchdog, progress):
        monkeypatch.setattr(module, "monotonic", clock)
    monkeypatch.setattr(start_watchdog, "ProcessGroup", Group)
    monkeypatch.setattr(start_watchdog, "Work", Work)
    found = Progress()
    marks = OperationMarks(found)
    before = vars(Group)["send"], Work.wait
    marks.start()
    yield found
    marks.stop()
    assert (vars(Group)["send"], Work.wait) == before


@pytest.mark.parametrize("name", [*MESSAGES, END_OF_BATCH, *COLLECTIVES])
def test_collectives_are_counted_by_group_and_messages_are_not(name: str, marked: Progress) -> None:
    first, second = Group("first"), Group("second")
    for group in (first, second, first):
        getattr(group, name)("tensor", option=1)
    counts = name in COLLECTIVES
    assert marked.counts == ({"first": 2, "second": 1} if counts else {"first": 0, "second": 0})
    assert marked.issued == Wait(name, first, 2 if counts else 0, 103.0)
    first.allreduce()  # pyright: ignore[reportAttributeAccessIssue]
    getattr(second, name)()
    assert marked.counts["first"] == (3 if counts else 1), "one count for all kinds"


def test_a_thread_waits_while_it_is_in_a_collective(marked: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    group, seen = Group("all"), []
    monkeypatch.setattr(Group, "during", lambda self: seen.append(dict(marked.waits)))
    monkeypatch.setattr(Work, "during", lambda self: seen.append(dict(marked.waits)))
    thread = threading.get_ident()
    work = group.allreduce()  # pyright: ignore[reportAttributeAccessIssue]
    group.broadcast()  # pyright: ignore[reportAttributeAccessIssue]
    assert work.wait() == "waited"
    assert seen == [
        {thread: Wait("allreduce", group, 1, 101.0)},
        {thread: Wait("broadcast", group, 2, 102.0)},
        {thread: Wait("allreduce", group, 1, 103.0)},  # what was begun as the first, waited for from now on
    ]
    assert marked.waits == {}
    assert marked.issued == Wait("broadcast", group, 2, 102.0)
    assert Work().wait() == "waited", "one that was begun in C++"
    assert len(seen) == 4
    assert seen[3] == {}


@pytest.mark.parametrize("where", ["begin", "wait"])
def test_the_collective_that_failed_is_remembered(
    where: str, marked: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object) -> None:
        raise KeyboardInterrupt

    group = Group("all")
    if where == "begin":
        monkeypatch.setattr(Group, "during", fail)
    with contextlib.suppress(KeyboardInterrupt):
        work = group.allreduce()  # pyright: ignore[reportAttributeAccessIssue]
        monkeypatch.setattr(Work, "during", fail)
        work.wait()
    failed = Wait("allreduce", group, 1, 101.0 if where == "begin" else 102.0)
    assert (marked.failed, marked.waits) == (failed, {})
    assert (marked.issued is None) == (where == "begin"), "what failed was not handed over"


def test_the_longest_wait_is_that_which_began_first() -> None:
    early, late = Wait("a", None, 1, 5.0), Wait("b", None, 1, 6.0)
    assert Progress().longest() is None
    for waits in ({1: early, 2: late}, {1: late, 2: early}):
        assert Progress(waits=waits).longest() == early


def test_a_batch_begins_in_its_phase_with_nothing_handed_over(marked: Progress) -> None:
    group = Group("all")
    marked.begin_microbatch()
    assert marked.issued is None
    group.allreduce()  # pyright: ignore[reportAttributeAccessIssue]
    marked.begin_microbatch()
    assert marked.issued == Wait("allreduce", group, 1, 102.0), "the same, from now on"
    marked.begin_batch("the evaluation")
    assert (marked.issued, marked.phase) == (None, "the evaluation")


def test_a_loader_is_waited_for_and_then_no_more(marked: Progress) -> None:
    def load() -> None:
        with marked.loading():
            assert marked.waits == {threading.get_ident(): Wait(LOADER, None, 0, 101.0)}
            raise ValueError("bad data")

    with pytest.raises(ValueError, match="bad data"):
        load()
    assert marked.waits == {}


def test_progress_of_two_ranks_is_their_own() -> None:
    one, other = Progress(), Progress()
    one.counts["all"] = 1
    one.waits[0] = Wait("a", None, 1, 1.0)
    assert (other.counts, other.waits, other.phase) == ({}, {}, "the start")


@pytest.mark.parametrize("error", [None, OSError, RuntimeError])
def test_what_was_written_in_time_is_known(error: type[Exception] | None) -> None:
    def write() -> None:
        if error is not None:
            raise error

    assert progress.within(60.0, write) == (error is None)


def test_a_file_system_that_hangs_is_not_waited_for() -> None:
    hangs = threading.Event()

    def write() -> None:
        hangs.wait(60.0)

    assert not progress.within(0.01, write)
    hangs.set()


def test_stacks_of_all_threads_stand_below_what_the_kernel_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = tmp_path / "task"
    for number, name, state, function in (
        (7, "python", "S", "futex_wait"),
        (12, "a (b) c", "R", "0"),
        (30, "quiet", "D", ""),
        (41, "gone", None, ""),
    ):
        (tasks / str(number)).mkdir(parents=True)
        (tasks / str(number) / "comm").write_text(f"{name}\n")
        (tasks / str(number) / "wchan").write_text(function)
        if state is not None:
            (tasks / str(number) / "stat").write_text(f"{number} ({name}) {state} 1 2 3")
    monkeypatch.setattr(progress, "_TASKS", tasks)
    ready, done = threading.Event(), threading.Event()

    def other_thread() -> None:
        ready.set()
        done.wait(60.0)

    thread = threading.Thread(target=other_thread)
    thread.start()
    ready.wait(60.0)
    progress.write_stacks(tmp_path / "new" / "hang-3", 5, "at iteration 3")
    done.set()
    thread.join()
    text = (tmp_path / "new" / "hang-3" / "rank-5.txt").read_text()
    head, kernel, python = text.split("\n\n", 2)
    assert head == f"rank 5, process {os.getpid()}: at iteration 3"
    assert sorted(kernel.splitlines()) == [
        "thread 12 (a (b) c): R",
        "thread 30 (quiet): D",
        "thread 7 (python): S in futex_wait",
    ]
    assert len(re.findall(r"^(?:Current t|T)hread 0x", python, re.MULTILINE)) >= 2
    assert "in other_thread" in python


def test_kernels_without_tasks_have_stacks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_TASKS", tmp_path / "none")
    progress.write_stacks(tmp_path, 0, "somewhere")
    assert "in test_kernels_without_tasks" in (tmp_path / "rank-0.txt").read_text()


@pytest.mark.parametrize(
    ("of_device", "of_group", "dumped"),
    [("nccl", "nccl", b"of nccl-legacy"), ("nccl", "nccl2", b"by the hook of nccl2"), ("gloo", "gloo", None)],
)
def test_the_hang_record_of_a_gpu_is_that_of_its_backend(
    of_device: str, of_group: str, dumped: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's hook keeps the operations of nccl2 under that name: the recorder of "nccl" would be empty."""
    given: dict[str, Any] = {}
    gpu: Any = SimpleNamespace(backend=of_device, kind="cuda", torch_device=torch.device("cuda", 3))
    backends = {gpu.torch_device: SimpleNamespace(name=lambda: of_group)}
    everyone = SimpleNamespace(_get_backend=backends.__getitem__)
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=everyone))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace", lambda *_what: b"of nccl-legacy")
    monkeypatch.setattr(
        _distributed_c10d, "_dump_fr_trace", lambda *_what, backend: f"by the hook of {backend}".encode()
    )
    monkeypatch.setattr(
        start_watchdog, "Watch", lambda *_given, **more: given.update(more) or SimpleNamespace(start=lambda: None)
    )
    start_watchdog.begin_watch(RunStatus(rank=0), LayoutConfig(), gpu, None)
    recorder = given["flight_recorder"]
    assert (recorder and recorder()) == dumped
