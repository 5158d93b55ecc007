"""Timers: what they measure, what they leave alone, how they print."""

import contextlib
import time
from collections.abc import Iterator

from megatron_ext.telemetry.timers import Timers, timers_text


def test_a_timer_adds_up_what_lies_between_start_and_stop():
    timers = Timers(level=1)
    began = time.perf_counter()
    for _ in range(2):
        timers("part", log_level=1).start()
        time.sleep(0.02)
        timers("part").stop()
        time.sleep(0.02)
    first, second = timers.take()["part"], timers.take()["part"]
    assert 0.04 <= first <= time.perf_counter() - began - 0.04
    assert second == 0.0


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
