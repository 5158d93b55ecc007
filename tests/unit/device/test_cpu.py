"""What the CPU device says of memory and time."""

import resource
from types import SimpleNamespace

import psutil
import pytest

from megatron_ext.device import cpu
from megatron_ext.device.cpu import CpuDevice, CpuMark
from megatron_ext.device.device_protocol import DeviceMemory
from tests.support.patched_in_one_module import replace_in


@pytest.mark.parametrize(("peak_kib", "expected"), [(900, 900 * 1024), (3, 5000)])
def test_a_cpus_memory_is_resident_and_its_peak_in_bytes(
    peak_kib: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux gives the peak in KiB, and may give it a little late."""
    monkeypatch.setattr(resource, "getrusage", lambda _who: SimpleNamespace(ru_maxrss=peak_kib))
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=5000)))
    assert CpuDevice().memory() == DeviceMemory(allocated=5000, max_allocated=expected, reserved=5000)


def test_a_cpus_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time and time on a core are told apart, and Linux counts waits, its second number, in nanoseconds."""
    device, clock = CpuDevice(), iter([10.0, 10.5, 20.0, 20.25, 30.0, 30.75])
    first, last = CpuMark(1.0, 0.5), CpuMark(4.0, 1.25)
    assert (device.seconds_between(first, last), device.seconds_run_between(first, last)) == (3.0, 0.75)
    replace_in(monkeypatch, cpu, "time", thread_time=lambda: next(clock))
    assert device.seconds_of_a_fixed_loop() == 0.25, "the quickest round"
    read = {"open": lambda path, _flags: 77, "read": lambda _file, _most: b"9000000000 2500000000 12\n"}
    replace_in(monkeypatch, cpu, "os", **read, close=lambda _file: None)
    assert device.seconds_without_processor() == 2.5
