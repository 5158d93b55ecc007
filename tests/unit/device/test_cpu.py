"""What the CPU device says of memory and time."""

import resource
from types import SimpleNamespace

import psutil
import pytest

from megatron_ext.device.cpu import CpuDevice
from megatron_ext.device.device_protocol import DeviceMemory


@pytest.mark.parametrize(("peak_kib", "expected"), [(900, 900 * 1024), (3, 5000)])
def test_a_cpus_memory_is_resident_and_its_peak_in_bytes(
    peak_kib: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux gives the peak in KiB, and may give it a little late."""
    monkeypatch.setattr(resource, "getrusage", lambda _who: SimpleNamespace(ru_maxrss=peak_kib))
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=5000)))
    assert CpuDevice().memory() == DeviceMemory(allocated=5000, max_allocated=expected, reserved=5000)
