"""The time that a rank computes in a step, by the clock and its own, on a CPU whose cores others use too."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.device import cpu
from megatron_ext.device.cpu import CpuDevice, CpuMark
from megatron_ext.plugins.rank_times.communication_clock import CommunicationClock, ComputeTime
from megatron_ext.plugins.rank_times.measures import _Exchange

SPINS = "import time\nend = time.monotonic() + 30.0\nwhile time.monotonic() < end: pass"


class Scripted(CpuDevice):
    """Gives marks that a test has written down: (clock, run, waited for a core)."""

    def __init__(self, marks: Sequence[tuple[float, float, float]]):
        super().__init__()
        self._marks, self._at = marks, 0

    def mark(self) -> CpuMark:
        seconds, run, _ = self._marks[self._at]
        self._at += 1
        return CpuMark(seconds, run)

    def seconds_without_processor(self) -> float:
        return self._marks[0 if self._at == 0 else self._at - 1][2]

    def seconds_of_a_fixed_loop(self) -> float:
        return 3e-5


def compute_time(*marks: tuple[float, float, float]) -> ComputeTime:
    """Return that of one step, whose marks are its beginning, those around its waits, and its end."""
    clock = CommunicationClock(Scripted(marks), None)
    clock.begin_step()
    for _ in range(len(marks) // 2 - 1):
        clock._timed("communication", lambda: None)
    clock.end_step()
    (found,) = clock.take_compute()
    return found


@pytest.mark.parametrize(
    ("marks", "own"),
    [
        # Marks are (clock, run, waited for a core). It ran, waited for others from 6 to 8, and ran.
        ([(0.0, 0.0, 5.0), (6.0, 6.0, 5.0), (8.0, 6.0, 5.0), (10.0, 8.0, 5.0)], 8.0),
        # For 3 of its 8 seconds others had its core.
        ([(0.0, 0.0, 5.0), (6.0, 4.0, 7.0), (8.0, 4.0, 7.0), (10.0, 5.0, 8.0)], 5.0),
        # It waited for a core too, but after it had waited for others, which is no part of its 8 seconds.
        ([(0.0, 0.0, 5.0), (6.0, 6.0, 5.0), (8.0, 6.0, 6.5), (10.0, 8.0, 6.5)], 8.0),
        # It slept for 3 seconds, and for one more others had its core.
        ([(0.0, 0.0, 5.0), (6.0, 2.0, 6.0), (8.0, 2.0, 6.0), (10.0, 4.0, 6.0)], 7.0),
    ],
)
def test_what_is_not_its_own(marks: list[tuple[float, float, float]], own: float) -> None:
    assert compute_time(*marks) == ComputeTime(8.0, own, 3e-5)


def test_the_longer_loop_of_both_ends_counts() -> None:
    class Changing(CpuDevice):
        loops = iter((1e-5, 3e-5, 2e-5, 1e-5))

        def seconds_of_a_fixed_loop(self) -> float:
            return next(self.loops)

    clock = CommunicationClock(Changing(), None)
    for _ in range(4):
        clock.begin_step()
        clock.end_step()
    assert [found.loop for found in clock.take_compute()] == [1e-5, 3e-5, 3e-5, 2e-5]


def test_the_fixed_loop_takes_processor_time_and_little_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that another process uses has no part in it: it is not the core's speed. The quickest round counts."""
    assert 1e-6 < min(CpuDevice().seconds_of_a_fixed_loop() for _ in range(100)) < 1e-3
    of_this_thread = iter((1.0, 1.5, 2.0, 2.25, 3.0, 4.0))
    monkeypatch.setattr(cpu, "time", SimpleNamespace(thread_time=lambda: next(of_this_thread)))
    assert CpuDevice().seconds_of_a_fixed_loop() == 0.25


@contextmanager
def core_that_another_uses() -> Iterator[None]:
    """Put this process and one that never rests on one core."""
    before = os.sched_getaffinity(0)
    core = min(before)
    with subprocess.Popen([sys.executable, "-S", "-c", SPINS]) as other:
        try:
            for process in (0, other.pid):
                os.sched_setaffinity(process, [core])
            yield
        finally:
            os.sched_setaffinity(0, before)
            other.kill()


def test_a_core_that_another_process_uses_is_seen() -> None:
    """What the step is short of its own time lies between what Linux counted inside of it and around it."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system puts no process on a core")
    clock = CommunicationClock(CpuDevice(), None)
    with core_that_another_uses():
        before = waited_for_a_core()
        clock.begin_step()
        began, deadline = waited_for_a_core(), time.monotonic() + 20.0
        while waited_for_a_core() - began < 0.1 and time.monotonic() < deadline:
            pass
        ended = waited_for_a_core()
        clock.end_step()
        after = waited_for_a_core()
    (found,) = clock.take_compute()
    assert ended - began >= 0.1
    slewed = 1e-3 * found.seconds  # the wall clock may be drawn by 500 millionths, Linux's own is not
    assert ended - began - slewed <= found.seconds - found.own <= after - before + slewed


def waited_for_a_core() -> float:
    """Return the seconds that this thread was ready to run and did not, the second of Linux's three numbers."""
    with open("/proc/thread-self/schedstat") as file:
        return int(file.read().split()[1]) / 1e9


def test_sleep_is_a_ranks_own_time() -> None:
    clock = CommunicationClock(CpuDevice(), None)
    clock.begin_step()
    time.sleep(0.1)
    clock.end_step()
    (found,) = clock.take_compute()
    assert 0.09 < found.own <= found.seconds


class Busy(CpuDevice):
    """Has not passed a mark before `done`."""

    done = False

    def has_passed(self, mark: CpuMark) -> bool:
        return self.done


class Counted:
    """A collective whose waits are counted."""

    waits = 0

    def wait(self) -> None:
        self.waits += 1


def test_times_are_read_once_the_device_has_copied_them() -> None:
    device, work, times = Busy(), Counted(), torch.arange(8.0)
    exchange = _Exchange(work, times)
    assert work.waits == 0
    assert [exchange.times(device), exchange.times(device)] == [None, None]
    device.done = True
    found = exchange.times(device)
    assert found is not None
    assert (found.tolist(), work.waits) == (times.tolist(), 1)
