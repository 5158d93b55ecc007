"""What the CPU device says of memory and time, by the machine and by its container; freed memory is kept."""

import platform
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_ext.device import cpu
from megatron_ext.device.cpu import CpuDevice, CpuMark, keep_freed_memory
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


GB = 10**9


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 GB, of which 10 are free; 8 GB to swap to, of which 3 are free."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GB, available=10 * GB))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=8 * GB, free=3 * GB))


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (None, None, (64, 10)),
        ("max", 5, (64, 10)),
        (64, 5, (64, 10)),
        (100, 5, (64, 10)),
        (32, None, (32, 10)),
        (32, 30, (32, 2)),
        (32, 5, (32, 10)),  # the machine has no more, however little the container uses
        (32, 40, (32, 0)),
    ],
)
@pytest.mark.parametrize(
    "files",
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
    ids=["cgroup 2", "cgroup 1"],
)
def test_memory_is_the_lower_of_the_machines_and_the_containers(
    files: tuple[str, str], limit: Any, used: Any, expected: tuple[int, int], machine: None, tmp_path: Path
) -> None:
    (tmp_path / "memory").mkdir()
    for name, value in zip(files, (limit, used), strict=True):
        if value is not None:
            (tmp_path / name).write_text(f"{value * GB if isinstance(value, int) else value}\n")
    total, free = expected
    assert cpu.host_memory(tmp_path) == (total * GB, free * GB)
    assert cpu.host_swap() == 8 * GB


PROGRAM = """
import mmap, resource, sys
from megatron_ext.device.cpu import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
size, blocks, rounds = 4 << 20, 8, 3
def step():
    held = [bytearray(b"x") * size for _ in range(blocks)]
    while held:
        held.pop()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
first = faults()
for _ in range(rounds):
    step()
print((faults() - first) * mmap.PAGESIZE / (rounds * blocks * size))
"""
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="musl has no such settings")
@pytest.mark.parametrize(("how", "least", "most"), [("kept", 0.0, 0.3), ("returned", 0.7, 1.3)])
def test_large_blocks_are_given_out_again_without_a_fault_for_each_page(how: str, least: float, most: float) -> None:
    """The share of the pages that are allocated anew: all of them without the setting."""
    environment = {"PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", PROGRAM, how]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert least <= float(ran.stdout) <= most


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_environment_sets_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "131072")
    assert not keep_freed_memory()
