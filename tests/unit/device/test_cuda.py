"""What the devices say of a machine: memory, GPUs and their links, clocks. Stand-ins take the machine's place."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.device import cuda
from megatron_ext.device.cuda import CudaDevice
from megatron_ext.device.device_protocol import DeviceMemory


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    """A GPU without a GPU: what torch is asked is answered by the tests."""
    made = object.__new__(CudaDevice)
    made.torch_device, made.model_name, made._operators = torch.device("cuda", 1), "H100", None
    answers = {"memory_allocated": 1, "max_memory_allocated": 2, "memory_reserved": 3, "mem_get_info": (10, 80)}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_given, answer=answer: answer)
    return made


def test_a_gpus_compute_capability(gpu: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index == 1 else None)
    assert gpu.compute_capability() == (9, 0)


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
