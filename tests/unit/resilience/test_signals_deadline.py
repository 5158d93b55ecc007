"""--exit-signal-deadline: when a stop that takes too long is given up, and what is said, recorded and remembered."""

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_ext.resilience import exit_record
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.resilience.signals import SignalWatcher, StopDeadline
from megatron_ext.resilience.watchdog import Watch
from tests.support.forked import Forked


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
