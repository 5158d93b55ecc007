"""What the devices say of a machine: memory, GPUs and their links, clocks. Stand-ins take the machine's place."""

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from megatron_ext.device import cpu, cuda, gpu_inventory, host_memory
from megatron_ext.device.cpu import CpuDevice, CpuMark
from megatron_ext.device.cuda import CudaDevice
from megatron_ext.device.protocol import DeviceMemory
from tests.support.of_one_module import replace_in

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
    assert host_memory.host_memory(tmp_path) == (total * GB, free * GB)
    assert host_memory.host_swap() == 8 * GB


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


def test_links_of_sixteen_gpus_are_by_pairs() -> None:
    """Each pair once, by numbers of two digits too; other devices of the matrix are none."""
    names = [f"GPU{number}" for number in range(16)]
    lines = ["\t" + "\t".join(f"\x1b[4m{name}\x1b[0m" for name in [*names, "NIC0", "CPU Affinity"])]
    for row, name in enumerate(names):
        kinds = ["X" if row == column else f"NV{min(row, column)}-{max(row, column)}" for column in range(16)]
        lines.append("\t".join([name, *kinds, "PIX", "0-63"]))
    lines.append("\t".join(["NIC0", *["PIX"] * 16, "X", ""]))
    found = gpu_inventory.links("\n".join([*lines, "", "Legend:", "  X    = Self"]))
    assert found == {(one, other): f"NV{one}-{other}" for one in range(16) for other in range(one + 1, 16)}
    assert gpu_inventory.links("No devices were found") == {}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build", "570.86"),
        ("NVRM version: none", "unknown"),
    ],
)
def test_the_drivers_version(text: str, version: str) -> None:
    assert gpu_inventory.driver_version(text) == version


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A GPU without a GPU: what torch is asked is answered by the tests."""
    made = object.__new__(CudaDevice)
    made.torch_device, made.model_name, made._operators = torch.device("cuda", 1), "H100", None
    answers = {"memory_allocated": 1, "max_memory_allocated": 2, "memory_reserved": 3, "mem_get_info": (10, 80)}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_given, answer=answer: answer)
    return made


@pytest.mark.parametrize(
    ("capability", "any_scale", "blocks"),
    [
        ((8, 0), False, False),
        ((8, 9), True, False),
        ((9, 0), True, True),
        ((10, 0), True, False),
        ((7, 9), False, False),
    ],
)
def test_what_a_gpu_lacks_for_fp8(
    capability: tuple[int, int], any_scale: bool, blocks: bool, gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    here = f"H100 has compute capability {capability[0]}.{capability[1]}"
    for asks, works in ((False, any_scale), (True, blocks)):
        lacks = gpu.lacks_for_fp8(blocks=asks)
        assert (lacks is None) == works
        assert lacks is None or lacks.endswith(f", and {here}")
    if any_scale and not blocks:
        assert str(gpu.lacks_for_fp8(blocks=True)).startswith("scales for blocks need compute capability 9.0 (Hopper)")


def test_a_gpus_memory_and_times(gpu: CudaDevice) -> None:
    assert gpu.memory() == DeviceMemory(allocated=1, max_allocated=2, reserved=3)
    assert gpu.capacity() == (80, 10), "in all, and free"
    first, last = SimpleNamespace(elapsed_time=lambda other: 250.0 if other is last else -250.0), SimpleNamespace()
    pair: Any = (first, last)
    assert gpu.seconds_between(*pair) == gpu.seconds_run_between(*pair) == 0.25
    assert gpu.seconds_without_processor() == gpu.seconds_of_a_fixed_loop() == 0.0


@pytest.mark.parametrize("shapes", [True, False])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_capture_ends_as_it_began(
    shapes: bool, ranges: bool, gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that still wait are in it, and a second one is like the first."""
    done: list[Any] = []
    runtime = SimpleNamespace(cudaProfilerStart=lambda: "start", cudaProfilerStop=lambda: "stop")

    class Named:
        def __init__(self, *, record_shapes: bool) -> None:
            assert record_shapes

        def __enter__(self) -> None:
            done.append("shapes")

        def __exit__(self, *_given: object) -> None:
            done.append("no shapes")

    monkeypatch.setattr(torch.cuda, "check_error", done.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", Named)
    monkeypatch.setattr(cuda, "_runtime", lambda: runtime)
    monkeypatch.setattr(CudaDevice, "_name_ranges", staticmethod(lambda on: done.append(f"ranges {on}")))
    for _ in range(2):
        gpu.start_capture(shapes=shapes, ranges=ranges)
        gpu.stop_capture()
    began = [*["ranges True"] * ranges, "start", *["shapes"] * shapes]
    assert done == [*began, "wait", *["no shapes"] * shapes, "stop", "ranges False"] * 2
    done.clear()
    gpu.start_capture(shapes=True, ranges=False)
    gpu.stop_capture()
    gpu.start_capture(shapes=False, ranges=False)
    gpu.stop_capture()
    assert done.count("no shapes") == 1


def test_a_mark_is_of_the_stream_that_kernels_are_in(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """In another one, such as that of a capture, there is none."""
    noted: list[Any] = []
    event = SimpleNamespace(record=lambda: noted.append("recorded"), query=lambda: "passed")
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: noted.append(enable_timing) or event)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    for stream in ("default", "another"):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda stream=stream: stream)
        assert (gpu.mark() is event) == (stream == "default")
    assert noted == [True, "recorded"]
    passed: Any = event
    assert gpu.has_passed(passed) == "passed"
