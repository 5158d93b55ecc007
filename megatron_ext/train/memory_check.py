"""Checks whether the run fits into memory; after running out of memory, says what held how much and which flag helps.

The bytes come from the planner's formulas (`cost/memory.py`), which know nothing of libraries, communication buffers
and what the allocator loses between blocks. A run is refused only if weights, gradients and optimizer alone cannot fit,
and warned of if everything together comes near to what there is.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_ext import environment
from megatron_ext.config.schema import Config
from megatron_ext.cost.memory import described, estimate, gigabytes, helpful_flags, host_bytes, kept_at_least
from megatron_ext.device.cpu import host_memory, host_swap
from megatron_ext.device.device_protocol import Device
from megatron_ext.errors import ConfigurationError, MemoryExhaustedError, TrainingError
from megatron_ext.terminal import warn

_NEAR = 0.9  # of the memory: what is left is for libraries and buffers
_TEXTS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def check_it_fits(config: Config, device: Device) -> None:
    """Compare the memory that the run will need with this machine's; one rank of each machine warns.

    Raises:
        ConfigurationError: weights, gradients and optimizer state of a rank are more than all memory.
    """
    ranks = environment.local_world_size()
    if device.kind == "cpu":  # a machine's memory is shared by all its ranks, of whatever stages
        _check_what_is_kept(config, device, ranks)
        _warn_if_near(config, device, ranks)
        return
    _check_what_is_kept(config, device, 1)
    _check_the_host(config, ranks)
    _warn_if_near(config, device, 1)


def _check_what_is_kept(config: Config, device: Device, ranks: int) -> None:
    on_cpu, total = device.kind == "cpu", device.capacity()[0]
    stage, kept = kept_at_least(config, fused=not on_cpu, anywhere=on_cpu)
    each = sum(kept.values())
    if ranks * each > total + (host_swap() if on_cpu else 0):
        raise ConfigurationError(
            f"{_who(config, ranks, stage)} needs {gigabytes(each)} between steps ({described(kept)}), "
            f"but {_what(device)} has {gigabytes(total)} of memory; use {_advice(config, on_cpu)}"
        )


def _warn_if_near(config: Config, device: Device, ranks: int) -> None:
    on_cpu, free = device.kind == "cpu", device.capacity()[1]
    stage, needed = estimate(config, fused=not on_cpu)
    if ranks * needed.total > _NEAR * free and environment.local_rank() == 0:
        warn(
            f"{_who(config, ranks, stage)} needs about {gigabytes(needed.total)} ({described(needed.parts)}), and "
            f"{_what(device)} has {gigabytes(free)} of memory free: it may run out. What helps: "
            f"{_advice(config, on_cpu)}"
        )


def _what(device: Device) -> str:
    return "this machine" if device.kind == "cpu" else f"GPU {device.torch_device.index}"


def _check_the_host(config: Config, ranks: int) -> None:
    kept, total = host_bytes(config) * ranks, host_memory()[0]
    if kept > total + host_swap():
        raise ConfigurationError(
            f"{ranks} ranks keep {gigabytes(kept)} in host memory, but this machine has {gigabytes(total)}; use a "
            "smaller --optimizer-offload-fraction, or more machines"
        )


def _who(config: Config, ranks: int, stage: int) -> str:
    one = f"a rank of pipeline stage {stage}" if config.layout.pipeline_model_parallel_size > 1 else "a rank"
    return f"{ranks} x {one}" if ranks > 1 else one


def _advice(config: Config, on_cpu: bool) -> str:
    return "; or ".join(helpful_flags(config, estimate(config, fused=not on_cpu)[1], fused=not on_cpu))


def as_exhausted(error: BaseException, config: Config, device: Device) -> MemoryExhaustedError | None:
    """Return the error to raise in place of one that says that memory has run out; None of any other error."""
    if not is_exhausted(error):
        return None
    stage, needed = estimate(config, fused=device.kind == "cuda")
    memory = device.memory()
    first = " ".join(str(error).split()).split(". ")[0][:300]
    return MemoryExhaustedError(
        f"memory has run out ({first}). This rank held {gigabytes(memory.allocated)}, at most "
        f"{gigabytes(memory.max_allocated)}; by formula a rank of stage {stage}, which needs most, has "
        f"{gigabytes(needed.total)}: {described(needed.parts)}. What helps: {_advice(config, device.kind == 'cpu')}"
    )


@contextmanager
def telling_of_memory(config: Config, device: Device) -> Iterator[None]:
    """Raise MemoryExhaustedError in place of an error inside that says that memory has run out."""
    try:
        yield
    except TrainingError:
        raise
    except Exception as error:
        exhausted = as_exhausted(error, config, device)
        if exhausted is None:
            raise
        raise exhausted from error


def is_exhausted(error: BaseException) -> bool:
    """Return whether the error says that memory of the host or the device has run out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _TEXTS)
