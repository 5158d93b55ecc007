"""CUDA_DEVICE_MAX_CONNECTIONS: who gets 1, who is warned, and that a user's value stays."""

import ctypes
from typing import Any

import pytest

from megatron_ext.config.schema import LayoutConfig
from megatron_ext.device import hardware_queues
from megatron_ext.device.hardware_queues import VARIABLE, compute_capability, mistake, prepare, wants_one_queue

HOPPER, BLACKWELL = 9, 10
TENSOR = LayoutConfig(tensor_model_parallel_size=2)


@pytest.mark.parametrize(
    ("layout", "capability", "one"),
    [
        (LayoutConfig(), HOPPER, False),
        (LayoutConfig(pipeline_model_parallel_size=4), HOPPER, False),
        (TENSOR, HOPPER, True),
        (TENSOR, None, True),
        (TENSOR, BLACKWELL, False),
        (LayoutConfig(context_parallel_size=2), HOPPER, True),
        (LayoutConfig(tensor_model_parallel_size=2, use_torch_fsdp2=True), HOPPER, False),
        (LayoutConfig(context_parallel_size=2, use_megatron_fsdp=True), HOPPER, False),
    ],
)
def test_one_queue_is_for_overlap_before_blackwell(layout: LayoutConfig, capability: int | None, one: bool) -> None:
    assert wants_one_queue(layout, capability) == one
    assert (mistake(layout, capability, "8") is not None) == one
    assert mistake(layout, capability, None) is None
    sharded = layout.use_torch_fsdp2 or layout.use_megatron_fsdp
    assert (mistake(layout, capability, "1") is not None) == sharded


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(hardware_queues, "_DRIVER_FILES", (tmp_path,))
    monkeypatch.setattr(hardware_queues, "compute_capability", lambda: HOPPER)


def test_a_users_value_stays(hopper: None) -> None:
    for value in ("8", "1"):
        environment = {VARIABLE: value}
        warning = prepare(TENSOR, environment)
        assert environment == {VARIABLE: value}
        assert (warning is not None) == (value == "8")
    warning = prepare(LayoutConfig(use_megatron_fsdp=True), {VARIABLE: "1"})
    assert warning is not None
    assert f"unset {VARIABLE}" in warning


def test_it_is_set_where_it_helps(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout, expected in (
        (TENSOR, {VARIABLE: "1"}),
        (LayoutConfig(tensor_model_parallel_size=2, use_torch_fsdp2=True), {}),
        (LayoutConfig(tensor_model_parallel_size=2, device="cpu"), {}),
    ):
        environment: dict[str, str] = {}
        assert prepare(layout, environment) is None
        assert environment == expected
    monkeypatch.setattr(hardware_queues, "_DRIVER_FILES", ())
    environment = {}
    prepare(TENSOR, environment)
    assert environment == {}, "without a driver there is no GPU"


class Nvml:
    """NVIDIA's management library, as its header has it: results through pointers, 0 for success."""

    def __init__(self, major: int, failing: str = ""):
        self.major, self.failing, self.open = major, failing, 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return int(self.failing == "init")

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, gpu: Any) -> int:
        assert index.value == 0
        gpu._obj.value = 4711
        return int(self.failing == "handle")

    def nvmlDeviceGetCudaComputeCapability(self, gpu: ctypes.c_void_p, major: Any, minor: Any) -> int:
        assert gpu.value == 4711
        major._obj.value, minor._obj.value = self.major, 0
        return int(self.failing == "capability")


def test_the_capability_is_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(BLACKWELL)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: nvml)
    assert compute_capability() == BLACKWELL
    assert nvml.open == 0
    for failing in ("init", "handle", "capability"):
        monkeypatch.setattr(ctypes, "CDLL", lambda _name, failing=failing: Nvml(HOPPER, failing))
        assert compute_capability() is None


def test_without_the_library_it_is_unknown() -> None:
    assert compute_capability("libno-such-library.so.1") is None
