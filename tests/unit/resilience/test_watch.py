"""A run that is well goes on, however slow its machine is; the first word of what is not well ends it."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.resilience import progress as progress_module
from megatron_ext.resilience import watch as watch_module
from megatron_ext.resilience.board import Board
from megatron_ext.resilience.peer_processes import ProcessName
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.resilience.progress import EVALUATION, FORWARD_BACKWARD, LOADER, Wait
from megatron_ext.resilience.watch import Watch
from megatron_ext.train import evaluate, step

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: pidfd and /proc")


class SlowStore:
    """A store that answers, but late; after the test never, so that no thread of it goes on."""

    def __init__(self) -> None:
        self._store, self.seconds, self.is_over = HashStore(), 0.0, False

    def __getattr__(self, name: str) -> Any:
        time.sleep(self.seconds)
        while self.is_over:
            time.sleep(600.0)
        return getattr(self._store, name)


@pytest.fixture
def store() -> Iterator[SlowStore]:
    slow = SlowStore()
    yield slow
    slow.is_over = True


class Ended:
    """Stands for the end of this process: remembers what was said, and holds up the thread, a daemon, for ever."""

    def __init__(self) -> None:
        self.is_set, self.text = threading.Event(), ""

    def __call__(self, text: str | None, *_: Any, **__: Any) -> NoReturn:
        self.text = self.text or text or ""
        self.is_set.set()
        while True:
            time.sleep(600.0)

    def within(self, seconds: float) -> bool:
        return self.is_set.wait(seconds)


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Ended:
    end = Ended()
    monkeypatch.setattr(watch_module, "end_from_thread", end)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return end


@pytest.fixture
def status() -> RunStatus:
    """Rank 1, which waits for others since 10 s."""
    found = RunStatus(rank=1, iteration=3)
    found.progress.waits[0] = Wait("allreduce", None, 1, time.monotonic() - 10.0)
    return found


@pytest.fixture
def rank_0() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def start() -> Iterator[Callable[[Watch], None]]:
    started: list[Watch] = []

    def start(watch: Watch) -> None:
        started.append(watch)
        watch.start()

    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield start
    for watch in started:
        watch.close()
    signal.signal(signal.SIGTERM, before)


def name_of(process: subprocess.Popen[bytes]) -> ProcessName:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return dataclasses.replace(ProcessName.own(), pid=process.pid, start_time=int(fields[19]))


def watch_of(status: RunStatus, store: SlowStore, name: ProcessName) -> Watch:
    """Return the watch of rank 1, where rank 0 has said one word."""
    beat = {"beat": 1, "iteration": 3, "phase": "the save", "process": name.as_json()}
    shared: Any = store
    Board(shared, 0, 2).publish(beat)
    return Watch(status, 600.0, Board(shared, 1, 2), lambda group: ("", "", ()))


def test_a_slow_store_after_sigterm_is_not_a_dead_one(
    ended: Ended,
    status: RunStatus,
    store: SlowStore,
    rank_0: subprocess.Popen[bytes],
    start: Callable[[Watch], None],
) -> None:
    """On a machine with too much to do, where rank 0 saves and the others wait."""
    watch = watch_of(status, store, name_of(rank_0))
    start(watch)
    deadline = time.monotonic() + 60.0
    while 0 not in watch._names:  # which it learns from the store
        assert time.monotonic() < deadline
        time.sleep(0.01)
    store.seconds = 4.0
    os.kill(os.getpid(), signal.SIGTERM)
    assert not ended.within(3.5), ended.text
    assert rank_0.poll() is None
    rank_0.send_signal(signal.SIGSTOP)
    store.seconds = 60.0
    assert ended.within(60.0)
    assert "rank 0, which holds the ranks' store, does not answer" in ended.text
    assert rank_0.wait(60.0) == -signal.SIGKILL


def test_a_rank_of_another_machine_may_say_nothing_for_longer(
    ended: Ended,
    status: RunStatus,
    store: SlowStore,
    rank_0: subprocess.Popen[bytes],
    start: Callable[[Watch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert watch_module._SILENCE_FROM_AFAR >= 15.0
    for name, seconds in (
        ("_AFTER_NOTICE", 0.3),
        ("_SILENCE", 0.3),
        ("_SILENCE_FROM_AFAR", 2.5),
        ("_FOR_ANSWERS", 0.2),
    ):
        monkeypatch.setattr(watch_module, name, seconds)
    elsewhere = dataclasses.replace(name_of(rank_0), machine="another one")
    began = time.monotonic()
    start(watch_of(status, store, elsewhere))
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended.within(60.0)
    assert time.monotonic() - began >= 2.5, ended.text
    assert "rank 0 did not come: it does not answer" in ended.text
    assert rank_0.poll() is None, "that process id is another one's on this machine"


def test_a_rank_of_this_machine_that_runs_may_say_nothing_for_ever(
    ended: Ended,
    status: RunStatus,
    store: SlowStore,
    rank_0: subprocess.Popen[bytes],
    start: Callable[[Watch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After SIGTERM, where it saves. Once it is stopped, it is given up."""
    for name in ("_AFTER_NOTICE", "_SILENCE", "_SILENCE_FROM_AFAR", "_FOR_ANSWERS"):
        monkeypatch.setattr(watch_module, name, 0.2)
    watch = watch_of(status, store, name_of(rank_0))
    start(watch)
    deadline = time.monotonic() + 60.0
    while 0 not in watch._names:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    assert not ended.within(3.0), ended.text
    rank_0.send_signal(signal.SIGSTOP)
    assert ended.within(60.0)
    assert "rank 0 did not come: it is stopped" in ended.text


def test_who_ended_because_it_lost_another_is_not_the_first_cause(
    ended: Ended, status: RunStatus, store: SlowStore, start: Callable[[Watch], None]
) -> None:
    """It ends with 76, and may be seen to end before the one that it has lost."""
    shared: Any = store
    ranks = [subprocess.Popen(["sh", "-c", "read _; exit $0", str(code)], stdin=subprocess.PIPE) for code in (3, 76)]
    try:
        for rank, process in ((0, ranks[0]), (2, ranks[1])):
            beat = {"beat": 1, "iteration": 3, "phase": "the update", "process": name_of(process).as_json()}
            Board(shared, rank, 3).publish(beat)
        watch = Watch(status, 600.0, Board(shared, 1, 3), lambda group: ("", "", ()))
        start(watch)
        _end(ranks[1], lambda: 2 in watch._ends)
        assert watch.cause_of_loss(0.2) is None
        assert Board(shared, 0, 3).first_end() is None, "nor do the others hear of it"
        _end(ranks[0], lambda: 0 in watch._ends)
        cause = watch.cause_of_loss(60.0)
        assert cause is not None
        assert cause.startswith("rank 0 ended with exit code 3 (process ")
        assert Board(shared, 0, 3).first_end() == cause
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def _end(process: subprocess.Popen[bytes], is_seen: Callable[[], bool]) -> None:
    """Let the process end, and wait until the watch has seen it: before it is collected, as under a launcher."""
    deadline = time.monotonic() + 60.0
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    while not is_seen():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_the_device_is_in_is_a_hang_only_while_the_host_does_not_go_on(
    ended: Ended, start: Callable[[Watch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, whose collectives return before they are done."""
    now = 1000.0
    monkeypatch.setattr(progress_module, "monotonic", lambda: now)
    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
    status = RunStatus(rank=0, iteration=1)
    progress = status.progress
    watch = Watch(status, 600.0, None, lambda group: ("", "", ()), device_runs_ahead=True)
    progress.begin_batch(FORWARD_BACKWARD)
    watch._look()
    progress.issued = Wait("allreduce", None, 1, now - 6000.0)
    assert not watch._is_overdue(), "kernels are compiled in the first step"
    status.iteration = 2
    for _ in range(3):
        progress.begin_microbatch()
        now += 599.0
        assert not watch._is_overdue()
    now += 1.0
    assert watch._is_overdue()
    progress.begin_batch(EVALUATION)
    assert not watch._is_overdue()
    progress.issued = Wait("allreduce", None, 2, now)
    now += 600.0
    start(watch)
    assert ended.within(60.0)


def test_a_batch_forgets_the_collectives_before_it_and_its_microbatches_tell_of_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run: Any = SimpleNamespace(
        progress=RunStatus(rank=0).progress,
        device=SimpleNamespace(torch_device=torch.device("cpu")),
        config=SimpleNamespace(
            training=SimpleNamespace(
                global_batch_size=4, micro_batch_size=4, eval_global_batch_size=None, eval_micro_batch_size=None
            )
        ),
    )
    seen = []

    def held_out_loss(run: Any, microbatches: list[Any]) -> tuple[float, int]:
        seen.append(run.progress.issued)
        run.progress.issued = Wait(LOADER, None, 0, 1.0)
        list(step._on_device(run, [torch.zeros(1)]))  # pyright: ignore[reportArgumentType]
        return 1.0, 1

    monkeypatch.setattr(evaluate, "held_out_loss", held_out_loss)
    monkeypatch.setattr(evaluate, "num_microbatches", lambda *_: 1)
    data: Any = SimpleNamespace(loader=SimpleNamespace(global_batch=lambda *_, end: []))
    part: Any = SimpleNamespace(positions=range(8))
    assert evaluate._sum(run, data, part) == (2.0, 2)
    assert seen == [None, None]
    assert run.progress.issued.began > 1.0


def test_ranks_of_a_machine_learn_of_each_other_before_their_first_steps(
    status: RunStatus, store: SlowStore, rank_0: subprocess.Popen[bytes], start: Callable[[Watch], None]
) -> None:
    """Who ends before nobody has seen how, and steps of a small model begin at once."""
    watch = watch_of(status, store, name_of(rank_0))
    start(watch)
    deadline = time.monotonic() + 0.4
    while not watch._names:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert watch._until_the_next_look() == 0.5


def test_who_waits_for_the_names_of_others_asks_less_and_less(status: RunStatus, store: SlowStore) -> None:
    watch = watch_of(status, store, ProcessName.own())
    pauses = []
    for _ in range(6):
        pauses.append(watch._until_the_next_look())
        watch._beat_now()
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.5, 0.5]


def test_what_the_process_did_not_run_is_no_wait(status: RunStatus, store: SlowStore) -> None:
    watch = watch_of(status, store, ProcessName.own())
    watch._pauses.note(1000.0, 900.0)
    watch._pauses.note(1100.0, 1098.0)  # a busy machine
    assert [watch._pauses.time_run(began, 1200.0) for began in (800.0, 1050.0)] == [300.0, 150.0]
