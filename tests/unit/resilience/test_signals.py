"""Stopping on request, with real signals to real processes."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from megatron_ext.resilience import exit_record
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.resilience.signals import SignalWatcher, StopDeadline, WakeUp
from megatron_ext.resilience.watchdog import Watch
from tests.support.forked import Forked

LOOP = """
import signal, sys, time
from megatron_ext.resilience.signals import SignalWatcher
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
with SignalWatcher() as watcher:
    print("ready", flush=True)
    while not watcher.requested:
        time.sleep(0.01)
    print("stopping:", watcher.reason, flush=True)
    time.sleep(float(sys.argv[1]))
print("saved", flush=True)
"""


def start_loop(seconds_after: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOOP, str(seconds_after)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_lets_the_loop_finish(name: str):
    process = start_loop(0)
    process.send_signal(getattr(signal, name))
    assert process.communicate(timeout=20)[0] == f"stopping: {name}\nsaved\n"
    assert process.returncode == 0


def test_a_second_ctrl_c_interrupts_and_a_second_sigterm_does_not():
    process = start_loop(30)
    assert process.stdout is not None
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopping: SIGTERM\n"
    for repeated in (signal.SIGTERM, signal.SIGINT):
        process.send_signal(repeated)
        time.sleep(0.1)
        assert process.poll() is None
    while process.poll() is None:  # two that come before Python has handled the first are one
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    output, errors = process.communicate(timeout=20)
    assert output == ""
    assert errors.endswith("KeyboardInterrupt\n")


def test_an_ignored_sighup_stays_ignored() -> None:
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalWatcher() as watcher:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not watcher.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_time_to_stop_counts_from_the_first_sigterm():
    with SignalWatcher() as watcher:
        began = time.monotonic()
        signal.raise_signal(signal.SIGTERM)
        first = watcher.terminated_at
        assert first is not None
        assert began <= first <= time.monotonic()
        signal.raise_signal(signal.SIGTERM)
        assert watcher.terminated_at == first


TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.mark.parametrize(
    ("reason", "numbers", "found", "interrupts"),
    [
        (None, [], None, False),
        (None, [TERM], "SIGTERM", False),
        (None, [INT], "SIGINT", False),
        (None, [HUP], "SIGHUP", False),
        (None, [TERM, INT, HUP, TERM], "SIGTERM", False),  # the first Ctrl-C is one, whoever asked before
        (None, [INT, TERM, TERM], "SIGINT", False),
        (None, [HUP, INT, HUP], "SIGHUP", False),
        (None, [INT, INT], "SIGINT", True),
        (None, [TERM, INT, INT], "SIGTERM", True),
        ("an earlier attempt", [INT, TERM], "an earlier attempt", False),
        ("an earlier attempt", [INT, INT], "an earlier attempt", True),
    ],
)
def test_the_first_who_asks_is_the_reason_and_a_second_ctrl_c_interrupts(
    reason: str | None, numbers: list[signal.Signals], found: str | None, interrupts: bool
) -> None:
    before = signal.signal(HUP, signal.SIG_DFL)
    interrupted = False
    try:
        with SignalWatcher(reason=reason) as watcher:
            try:
                for number in numbers:
                    signal.raise_signal(number)
            except KeyboardInterrupt:
                interrupted = True
    finally:
        signal.signal(HUP, before)
    assert (watcher.reason, watcher.terminated_at is not None, interrupted) == (found, TERM in numbers, interrupts)
    assert watcher.requested == (found is not None)


@pytest.mark.parametrize("asked", [None, "an earlier attempt"])
@pytest.mark.parametrize(("kind", "stops"), [("file", True), ("link", True), ("folder", False), ("nothing", False)])
def test_what_is_named_stop_stops_unless_it_is_a_folder(
    asked: str | None, kind: str, stops: bool, tmp_path: Path
) -> None:
    """A link is no folder, wherever it leads; what stops is removed, where nobody has asked before."""
    stop = tmp_path / "stop"
    if kind == "link":
        stop.symlink_to(tmp_path, target_is_directory=True)
    elif kind != "nothing":
        stop.mkdir() if kind == "folder" else stop.touch()
    watcher = SignalWatcher(stop_file=stop, reason=asked)
    assert watcher.requested == (stops or asked is not None)
    assert watcher.reason == (asked or (f"the file {stop}" if stops else None))
    assert os.path.lexists(stop) == (kind == "folder" or (kind != "nothing" and asked is not None))


def test_a_stop_file_that_cannot_be_removed_stops_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    (tmp_path / "stop").touch()
    monkeypatch.setattr(Path, "unlink", refuse)
    assert SignalWatcher(stop_file=tmp_path / "stop").requested


def test_handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    with SignalWatcher() as watcher:
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before
    assert not watcher.requested
    assert watcher.reason is None
    assert watcher.for_good, "a stop is one for all restarts, unless somebody says otherwise"


def test_after_an_error_sigterm_does_not_cut_off_the_report():
    before, interrupted = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(ValueError, match="x"), SignalWatcher():
            raise ValueError("x")
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGINT) is interrupted


def test_a_forked_helper_is_ended_by_sigterm():
    with SignalWatcher() as watcher:
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.05)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not watcher.requested


def with_a_helper_of_a_helper() -> None:
    """Its parent is a helper, and not the process that watches."""
    with SignalWatcher():
        if os.fork() == 0:
            child = os.fork()
            if child == 0:
                time.sleep(600)
            time.sleep(0.05)
            os.kill(child, signal.SIGTERM)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            os._exit(0)
        os.wait()


def test_a_helper_of_a_helper_is_ended_as_well(begin: Callable[..., Forked]):
    assert begin(with_a_helper_of_a_helper).ended() == (0, "-15\n")


def test_a_stop_file_stops_this_run_and_not_the_next(tmp_path: Path):
    file = tmp_path / "stop"
    watcher = SignalWatcher(stop_file=file)
    assert not watcher.requested
    file.touch()
    assert watcher.requested
    assert watcher.reason == f"the file {file}"
    assert watcher.requested
    assert not file.exists()
    assert not SignalWatcher(stop_file=file).requested


ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def wake_up() -> Iterator[WakeUp]:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    started = WakeUp()
    started.start()
    yield started
    started.stop()
    started.close()
    signal.signal(signal.SIGTERM, before)


def is_readable(wake_up: WakeUp) -> bool:
    return bool(select.select([wake_up.descriptor], [], [], 0.0)[0])


def test_a_signal_is_seen_once(wake_up: WakeUp) -> None:
    assert not is_readable(wake_up)
    os.kill(os.getpid(), signal.SIGTERM)
    assert is_readable(wake_up)
    assert wake_up.signals() == bytes([signal.SIGTERM])
    assert wake_up.signals() == b""


def test_wake_ends_a_wait_without_a_signal(wake_up: WakeUp) -> None:
    wake_up.wake()
    assert is_readable(wake_up)
    assert wake_up.signals() == b"\0"


FORKS = """
import os, signal
from megatron_ext.resilience.signals import WakeUp

signal.signal(signal.SIGTERM, lambda *_: None)
started = WakeUp()
started.start()
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(started.signals())
"""


def test_a_signal_of_a_forked_helper_is_its_own() -> None:
    """In an interpreter of its own: where asyncio has been imported, as here, it does the same at a fork."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "b''\n"


def stop_slowly(
    status: RunStatus, seconds: float | None, saved: Sequence[int] = (), for_good: bool = True, takes: float = 60.0
) -> None:
    """A rank that is asked to stop, and needs so long for it."""
    with SignalWatcher() as signals, StopDeadline(seconds, signals, status, lambda: saved):
        signals.for_good = for_good
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(takes)
    print("saved")


OVER = "stopped at iteration 7: SIGTERM; --exit-signal-deadline 1.2 (seconds) is over"


def test_a_stop_that_takes_too_long_ends_a_second_before_the_deadline(begin: Callable[..., Forked]) -> None:
    began = time.monotonic()
    process = begin(stop_slowly, RunStatus(rank=0, iteration=7), 1.2)
    assert process.ended() == (75, f"rank 0: {OVER}; nothing saved: no --save\n")
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("seconds", [None, 600.0])
def test_a_stop_within_the_deadline_ends_as_it_would(seconds: float | None, begin: Callable[..., Forked]) -> None:
    process = begin(stop_slowly, RunStatus(rank=0, iteration=7), seconds, (), True, 0.3)
    assert process.ended() == (0, "saved\n")


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ([], " before a checkpoint was finished; {save} holds none. Give it more time"),
        (
            [5, 10],
            " before this step was saved; the newest checkpoint in {save} is that of iteration 10; start again with "
            "--load {save}, and give it more time or a smaller --save-interval",
        ),
    ],
)
def test_who_gives_up_a_stop_names_the_newest_checkpoint(
    saved: list[int], said: str, tmp_path: Path, begin: Callable[..., Forked]
) -> None:
    process = begin(stop_slowly, RunStatus(rank=3, save=str(tmp_path), iteration=7), 1.2, saved)
    line = f"rank 3: {OVER}{said.format(save=tmp_path)}"
    assert process.ended() == (75, f"{line}\n")
    record = json.loads((tmp_path / "exit.json").read_text())
    assert (record["code"], record["message"], record["iteration"]) == (75, line, 7)


def test_one_rank_says_why_all_give_up(tmp_path: Path, begin: Callable[..., Forked]) -> None:
    exit_record.write(tmp_path, code=75, rank=0, message="rank 0: why", iteration=7)
    assert begin(stop_slowly, RunStatus(rank=1, save=str(tmp_path), iteration=7), 1.0).ended() == (75, "")
    assert json.loads((tmp_path / "exit.json").read_text())["message"] == "rank 0: why"


@pytest.mark.parametrize("for_good", [False, True])
def test_a_deadline_is_remembered_only_if_the_stop_is_for_good(
    for_good: bool, tmp_path: Path, begin: Callable[..., Forked], attempt: Callable[..., Path]
) -> None:
    """With --elastic, SIGTERM is how torchrun starts the ranks of another world: these go on."""
    told = attempt(tmp_path, 0)
    code, said = begin(stop_slowly, RunStatus(rank=0), 1.0, (), for_good).ended()
    assert code == 75
    assert said.startswith("rank 0: stopped before the first step: SIGTERM; ")
    assert f"{json.loads(told.read_text())['message']['message']}\n" == said, "torchrun repeats it"
    assert (tmp_path / "stopped.json").exists() == for_good


def seen_by_the_watch(ago: float, seconds: float, signalled: bool) -> None:
    """A rank whose main thread waits in C++: its watch alone has seen SIGTERM, some seconds ago, or first."""
    status = RunStatus(rank=0, iteration=7)
    status.watch = watch = Watch(status, 600.0, None, lambda group: ("", "", ()))
    with SignalWatcher() as signals, StopDeadline(seconds, signals, status, list):
        if signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        watch.terminated_at = time.monotonic() - ago
        time.sleep(0.6)


@pytest.mark.parametrize(
    ("ago", "seconds", "signalled", "code"), [(29.2, 30.0, False, 75), (100.0, 60.0, True, 75), (1.0, 60.0, False, 0)]
)
def test_a_signal_that_the_watch_alone_has_seen_counts(
    ago: float, seconds: float, signalled: bool, code: int, begin: Callable[..., Forked]
) -> None:
    assert begin(seen_by_the_watch, ago, seconds, signalled).ended()[0] == code
