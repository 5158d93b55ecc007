"""CUDA_DEVICE_MAX_CONNECTIONS is how many hardware queues a process has on its GPU. This needs no torch.

With one queue, a communication kernel that is launched before a computation also begins before it, which
megatron-core's overlap of tensor- and context-parallel communication relies on. Blackwell keeps that order by itself,
and sharded data parallelism (FSDP) needs several queues for its own overlap; Megatron-LM's rules are the same.

CUDA reads the variable when it starts in a process, so that it must be set before torch looks for GPUs.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

from megatron_ext.config.schema import LayoutConfig

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_BLACKWELL = 10  # compute capability, major
_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidia0"))


def shows_gpu() -> bool:
    """Return whether this machine shows an NVIDIA GPU: a driver, or its device."""
    return any(path.exists() for path in _DRIVER_FILES)


def driver_text() -> str:
    """Return the driver's description of itself, with its version; empty without a driver."""
    return next((path.read_text() for path in _DRIVER_FILES if path.is_file()), "")


def wants_one_queue(layout: LayoutConfig, capability: int | None) -> bool:
    """Return whether the variable should be 1.

    Args:
        layout: the layout of the run.
        capability: major compute capability of the oldest GPU; None where it is unknown, which counts as old.
    """
    overlaps = layout.tensor_model_parallel_size > 1 or layout.context_parallel_size > 1
    return overlaps and not layout.flags_that_divide_weights and (capability is None or capability < _BLACKWELL)


def mistake(layout: LayoutConfig, capability: int | None, setting: str | None) -> tuple[str, str] | None:
    """Return why the user's value of the variable costs speed, with advice; None if it does not."""
    if setting is None:
        return None
    if wants_one_queue(layout, capability):
        if setting == "1":
            return None
        return (
            "before Blackwell, tensor- and context-parallel communication overlaps with 1 hardware queue alone",
            f"unset {VARIABLE}: the program sets 1",
        )
    if setting == "1" and layout.flags_that_divide_weights:
        return "the communication of FSDP overlaps with more than 1 hardware queue", f"unset {VARIABLE}"
    return None


def prepare(layout: LayoutConfig, environment: MutableMapping[str, str] = os.environ) -> str | None:
    """Set the variable for the run that begins, where it is not set; return a warning where it is, to a wrong value."""
    if layout.device == "cpu" or not shows_gpu():
        return None
    capability, setting = compute_capability(), environment.get(VARIABLE)
    if setting is None and wants_one_queue(layout, capability):
        environment[VARIABLE] = "1"
    wrong = mistake(layout, capability, setting)
    return wrong and f"{VARIABLE}={setting}: {wrong[0]}; {wrong[1]}"


def compute_capability(library: str = "libnvidia-ml.so.1") -> int | None:
    """Return the major compute capability of this machine's first GPU; None where the driver's management library is
    missing.

    That library does not start CUDA. Machines have GPUs of one kind; of mixed ones the first counts.
    """
    import ctypes  # which only a machine with a GPU needs

    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        gpu, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(gpu)) != 0:
            return None
        failed = nvml.nvmlDeviceGetCudaComputeCapability(gpu, ctypes.byref(major), ctypes.byref(minor))
        return None if failed else major.value
    finally:
        nvml.nvmlShutdown()
