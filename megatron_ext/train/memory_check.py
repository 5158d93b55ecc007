"""Will the run fit into memory, and where it did not: what held how much, and which flag helps.

The bytes are those of the planner's formulas (`plan/memory.py`), which know nothing of libraries, communication buffers
and what the allocator loses between blocks. A run is refused only if weights, gradients and optimizer alone cannot fit,
and warned of if everything together comes near to what there is.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_ext import environment
from megatron_ext.config.schema import Config
from megatron_ext.device.host_memory import host_memory
from megatron_ext.device.protocol import Device
from megatron_ext.errors import ConfigurationError, MemoryExhaustedError, TrainingError
from megatron_ext.plan.memory import MemoryEstimate
from megatron_ext.plan.relief import described, estimate, gigabytes, helpful_flags, host_bytes
from megatron_ext.terminal import warn

_STATE = ("weights", "gradients", "optimizer")
_NEAR = 0.9  # of the memory: what is left is for libraries and buffers
_TEXTS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")


def check_it_fits(config: Config, device: Device) -> None:
    """Compare what the run will need with what this machine has; one rank of each machine warns.

    Raises:
        ConfigurationError: what a rank keeps between steps is more than all memory.
    """
    stage, needed = estimate(config, fused=device.kind == "cuda")
    ranks = environment.local_world_size()
    where = f"a rank of pipeline stage {stage}" if config.layout.pipeline_model_parallel_size > 1 else "a rank"
    if device.kind == "cpu":
        _compare(config, needed, f"{ranks} x {where}" if ranks > 1 else where, ranks, device.capacity(), "this machine")
        return
    _compare(config, needed, where, 1, device.capacity(), f"GPU {device.torch_device.index}")
    on_host, of_host = host_bytes(config) * ranks, host_memory()[0]
    if on_host > of_host:
        raise ConfigurationError(
            f"{ranks} ranks keep {gigabytes(on_host)} in host memory, but this machine has {gigabytes(of_host)}; use a "
            "smaller --optimizer-offload-fraction, or more machines"
        )


def _compare(
    config: Config, needed: MemoryEstimate, who: str, ranks: int, capacity: tuple[int, int], what: str
) -> None:
    total, free = capacity
    state = {part: size for part, size in needed.parts.items() if part in _STATE}
    advice = "; or ".join(helpful_flags(config, needed, fused=what.startswith("GPU")))
    if ranks * sum(state.values()) > total:
        raise ConfigurationError(
            f"{who} needs {gigabytes(sum(state.values()))} between steps ({described(state)}), but {what} has "
            f"{gigabytes(total)} of memory; use {advice}"
        )
    if ranks * needed.total > _NEAR * free and environment.local_rank() == 0:
        warn(
            f"{who} needs about {gigabytes(needed.total)} ({described(needed.parts)}), and {what} has "
            f"{gigabytes(free)} of memory free: it may run out. What helps: {advice}"
        )


def as_exhausted(error: BaseException, config: Config, device: Device) -> MemoryExhaustedError | None:
    """Return the error to raise in place of one that says that memory has run out; None of any other error."""
    if not is_exhausted(error):
        return None
    stage, needed = estimate(config, fused=device.kind == "cuda")
    held = device.memory()
    helps = "; or ".join(helpful_flags(config, needed, fused=device.kind == "cuda"))
    first = " ".join(str(error).split()).split(". ")[0][:300]
    return MemoryExhaustedError(
        f"memory has run out ({first}). This rank held {gigabytes(held.allocated)}, at most "
        f"{gigabytes(held.max_allocated)}; by formula a rank of stage {stage}, which needs most, has "
        f"{gigabytes(needed.total)}: {described(needed.parts)}. What helps: {helps}"
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
