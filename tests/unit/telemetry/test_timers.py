"""Timers: what they measure, what they leave alone, how they print."""

import contextlib
from collections.abc import Iterator

import pytest

from megatron_ext.telemetry import timers as timers_module
from megatron_ext.telemetry.timers import Timers, timers_text


class Clock:
    """A clock that a test moves, and a device that is three seconds behind: to wait for it takes as long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(timers_module.time, "perf_counter", lambda: self.now)

    def synchronize(self) -> None:
        self.now += 3.0


def test_what_the_device_had_to_do_before_is_left_out_and_what_it_was_given_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    timers = Timers(level=1, synchronize=clock.synchronize)
    for seconds in (1.0, 2.0):
        timers("part", log_level=1).start()
        clock.now += seconds
        timers("part").stop()
        clock.now += 100.0
    timers("other", log_level=1).start()
    timers("other").stop()
    assert timers.take() == {"part": 9.0, "other": 3.0}
    assert timers.take() == {"part": 0.0, "other": 0.0}
    timers("part").start()
    timers("part").stop()
    assert timers.take() == {"part": 3.0, "other": 0.0}


@pytest.mark.parametrize(("level", "names"), [(0, ["a"]), (1, ["a", "b"]), (2, ["a", "b", "c"])])
def test_timers_up_to_the_level_run(level: int, names: list[str]) -> None:
    timers = Timers(level=level)
    for number, name in enumerate("abc"):
        timers(name, log_level=number).start()
        timers(name).stop()
    timers("never told its level").start()
    assert list(timers.take()) == names


def test_a_timer_that_is_a_range_counts_its_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timers = Timers(level=1, synchronize=clock.synchronize, open_range=lambda name: contextlib.nullcontext())
    for name, level in (("optimizer", 1), ("forward-compute", 2)):
        timers(name, log_level=level).start()
        clock.now += 1.0
        timers(name).stop()
    assert timers.take() == {"optimizer": 4.0}


def test_a_timer_is_started_once_and_stopped_once() -> None:
    timers = Timers(level=1, open_range=None)
    timers("part", log_level=1).start()
    with pytest.raises(AssertionError, match="runs already"):
        timers("part").start()
    timers("part").stop()
    with pytest.raises(AssertionError, match="was not started"):
        timers("part").stop()


def test_timers_above_the_level_do_not_wait_for_the_device():
    waits: list[None] = []
    timers = Timers(level=1, synchronize=lambda: waits.append(None))
    timers("fine part", log_level=2).start(barrier=True)
    timers("fine part").stop()
    assert (waits, timers.take()) == ([], {})
    timers("part", log_level=1).start(barrier=True)
    timers("part").stop()
    assert len(waits) == 2
    assert list(timers.take()) == ["part"]


def test_the_text():
    text = timers_text([{"optimizer": 0.5, "embedding": 0.02}, {"optimizer": 0.25}], iterations=10)
    assert text == (
        "(min, max) time across ranks (ms):\n"
        "    optimizer ......................................: (25.00, 50.00)\n"
        "    embedding ......................................: (2.00, 2.00)"
    )
    assert timers_text([{}, {}], iterations=10) == ""


def test_every_timer_is_a_range_of_a_trace_whatever_its_level():
    ranges: list[str] = []

    @contextlib.contextmanager
    def open_range(name: str) -> Iterator[None]:
        ranges.append(f"begin {name}")
        yield
        ranges.append(f"end {name}")

    timers = Timers(level=1, open_range=open_range)
    for name, level in (("optimizer", 1), ("forward-compute", 2), ("forward-compute", 2)):
        timers(name, log_level=level).start()
        timers(name).stop()
    assert ranges == ["begin optimizer", "end optimizer"] + 2 * ["begin forward", "end forward"]
    assert list(timers.take()) == ["optimizer"]
