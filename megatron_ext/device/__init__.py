"""This room runs GPUs over NCCL and CPU processes over gloo. Nobody else asks the machine whether it has a GPU.

`install(kind)` is called once per process, before anything of megatron-core is imported; `current()` then
answers every question about the device. On the CPU it also adapts megatron-core's CUDA assumptions
(`megatron_ext/device/adaptation.py`); on CUDA nothing is replaced.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Collection
from typing import TYPE_CHECKING

from megatron_ext.device import nccl_choice
from megatron_ext.device.external_kernels import leave_out
from megatron_ext.device.gpu_inventory import obstacle, survey
from megatron_ext.errors import ConfigurationError
from megatron_ext.terminal import warn

if TYPE_CHECKING:
    from megatron_ext.device.device_protocol import Device

_current: Device | None = None


def install(
    kind: str,
    *,
    fuses: bool = True,
    own_kernels: bool = False,
    kernels: Collection[str] = (),
    engine: bool = True,
    nccl_backend: str = nccl_choice.LEGACY,
) -> Device:
    """Choose the device of this process and prepare megatron-core for it. Calling it again is harmless.

    Args:
        kind: "cuda", "cpu", or "auto" (CUDA where this machine shows a GPU).
        fuses: whether megatron-core compiles its fused functions, which a GPU without Triton or a C compiler cannot.
            A CPU process never does: of them it calls squared ReLU alone, which gives the same bits, and importing the
            compiler is a third of the program's start.
        own_kernels: whether a GPU uses our Triton kernels (`device.triton`), which it cannot without Triton or a C
            compiler either.
        kernels: packages that megatron-core may take kernels from (`device.external_kernels`).
        engine: whether this process is going to import megatron-core.
        nccl_backend: which of torch's implementations of NCCL a GPU communicates with (`device.nccl_choice`).
    Raises:
        ConfigurationError: the machine shows a GPU, torch can use none, and `kind` is not "cpu"; or CUDA was asked for
            and torch sees fewer GPUs than local ranks.
        RuntimeError: another device is installed already, or megatron-core was imported first.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    wrong = nccl_choice.choose(nccl_backend) if kind != "cpu" else None
    if wrong and local_rank == 0:
        warn(wrong)
    import torch

    global _current
    if kind != "cpu" and not torch.cuda.is_available():
        _require_no_gpus(kind)
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if _current is not None:
        if _current.kind != kind:
            raise RuntimeError(f"device {_current.kind!r} is installed; it cannot become {kind!r} in one process")
        return _current
    if any(name.startswith("megatron.core") for name in sys.modules):
        raise RuntimeError("megatron.core was imported before megatron_ext.device.install()")
    _quiet_engine()
    leave_out(kernels)
    if kind == "cpu":
        from megatron_ext.device.adaptation import adapt
        from megatron_ext.device.cpu import CpuDevice, keep_freed_memory

        keep_freed_memory()
        adapt()
        _current, fuses = CpuDevice(), False
    else:
        from megatron_ext.device.cuda import CudaDevice

        seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if local_rank >= seen:
            raise ConfigurationError(
                f"--device cuda: local rank {local_rank} needs GPU {local_rank}, but torch sees {seen}. "
                "Start at most one process per GPU, or use --device cpu."
            )
        _current = CudaDevice(local_rank)
        fuses = _choose_kernels(local_rank, fuses=fuses, own_kernels=own_kernels)
    if engine and not fuses:
        from megatron_ext.device.external_kernels import UNUSED_ON_CPU, leave_uncompiled

        leave_uncompiled(UNUSED_ON_CPU if kind == "cpu" else ())
    return _current


def _require_no_gpus(kind: str) -> None:
    """Raise ConfigurationError where this machine shows a GPU, which torch cannot use: a run on the CPU instead could
    go on for days unnoticed."""
    surveyed = survey()
    found = surveyed and obstacle(surveyed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if found:
        raise ConfigurationError(f"--device {kind}: {found}. To train on CPU processes, use --device cpu.")


def _choose_kernels(local_rank: int, *, fuses: bool, own_kernels: bool) -> bool:
    """Use our own kernels, or not, and return whether megatron-core's functions are compiled."""
    from megatron_ext.device.triton import kernel_choice

    compiles = (fuses or own_kernels) and _can_fuse(local_rank)
    kernel_choice.use(own_kernels and compiles)
    return fuses and compiles


def _can_fuse(local_rank: int) -> bool:
    """Return whether kernels can be compiled on this machine, whose first rank warns if they cannot."""
    from megatron_ext.device.external_kernels import missing_for_kernels

    missing = missing_for_kernels()
    if missing and local_rank == 0:
        warn(f"{missing}: fused functions run as plain torch (as with --disable-jit-fuser --no-triton-kernels)")
    return missing is None


def _quiet_engine() -> None:
    """Keep the engine's advice to its own developers, repeated by every rank, out of a user's output."""
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.distributed\.checkpoint")
    # It advises a device_id, without which parallel/groups.py does on purpose. The current device is the right one.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under current context")


def current() -> Device:
    """Return the device that `install` chose for this process."""
    assert _current is not None, "megatron_ext.device.install() has not been called"
    return _current
