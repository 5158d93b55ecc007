"""The device of CPU processes, which communicate over gloo.

`host_memory` is the memory that this machine, or the container of the process, lets its processes use. No torch here.

The settings of glibc make it keep the memory that a CPU process frees, for the next allocation.

A training step frees in its backward pass the memory that its forward pass has allocated, and the next step allocates
it again. glibc gives large blocks back to the system meanwhile, which hands them out zeroed, page by page, each at the
price of a fault: on a CPU that is several percent of a small model's step (docs/decisions.md).
"""

import ctypes
import math
import os
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from torch.distributed import ProcessGroup

from megatron_ext.device.device_protocol import DeviceMemory

_CGROUP = Path("/sys/fs/cgroup")
_LIMIT, _USED = ("memory.max", "memory/memory.limit_in_bytes"), ("memory.current", "memory/memory.usage_in_bytes")


def host_memory(cgroup: Path = _CGROUP) -> tuple[int, int]:
    """Return the total and the free bytes of memory.

    The limit of a control group, as containers and schedulers set it, counts where it is lower: a process that exceeds
    it is killed without a message.
    """
    memory = psutil.virtual_memory()
    limit, used = _number(cgroup, _LIMIT), _number(cgroup, _USED)
    if limit is None or limit >= memory.total:
        return memory.total, memory.available
    return limit, max(0, min(memory.available, limit - (used or 0)))


def host_swap() -> int:
    """Return the bytes that can be swapped out: with them more is kept, if slowly."""
    return psutil.swap_memory().total


def _number(folder: Path, names: tuple[str, ...]) -> int | None:
    """Return the first that can be read; None where there is none, or no limit ("max")."""
    for name in names:
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):
            continue
    return None


class CopiesAtOnce:
    """Implements `Copies` for CPU processes: the copy is complete when the call returns."""

    def copy(self, to: torch.Tensor, tensor: torch.Tensor) -> None:
        to.copy_(tensor)

    def hold(self) -> None:
        """Do nothing: nothing is under way."""

    def wait(self) -> None:
        """Do nothing: nothing is under way."""


class CpuMark(NamedTuple):
    """A moment of a thread."""

    seconds: float
    """The clock."""

    run: float
    """Seconds that the thread has run on a core."""


class CpuDevice:
    """Implements `Device` for CPU processes."""

    kind = "cpu"
    backend = backend_with_host = "gloo"
    reads_wait = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.model_name = platform.processor() or platform.machine()

    def backend_text(self) -> str:
        return self.backend

    def read_later(self, numbers: torch.Tensor) -> Callable[[], list[float]]:
        return numbers.tolist

    def bind_thread(self) -> None:
        """Do nothing: threads share the one CPU."""

    def bind_group(self) -> None:
        """Do nothing: there is one CPU to communicate from."""

    def compute_capability(self) -> None:
        """Return None."""

    def lacks_for_overlap(self, group: ProcessGroup) -> str | None:
        """Lack what GPUs read of each other: products wait for what gloo sends."""
        return "CPU processes have no symmetric memory"

    def synchronize(self) -> None:
        """Do nothing: CPU work is done when the call returns."""

    def copies(self) -> CopiesAtOnce:
        return CopiesAtOnce()

    def memory(self) -> DeviceMemory:
        """Return the resident memory of the process: a CPU has no separate allocator to ask."""
        resident = psutil.Process().memory_info().rss
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return DeviceMemory(allocated=resident, max_allocated=max(peak, resident), reserved=resident)

    def capacity(self) -> tuple[int, int]:
        """Return the total and the free bytes of the machine's memory, or of the container's if that is less."""
        return host_memory()

    def rng_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def mark(self) -> CpuMark:
        return CpuMark(time.perf_counter(), time.thread_time())

    def has_passed(self, mark: CpuMark) -> bool:
        return True

    def seconds_between(self, first: CpuMark, last: CpuMark) -> float:
        return last.seconds - first.seconds

    def seconds_run_between(self, first: CpuMark, last: CpuMark) -> float:
        return last.run - first.run

    def seconds_without_processor(self) -> float:
        """Return Linux's count for this thread, without time that a virtual machine's host took; 0 on other systems."""
        try:
            file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            return 0.0
        try:
            return int(os.read(file, 100).split()[1]) / 1e9  # after the time that it ran
        finally:
            os.close(file)

    def seconds_of_a_fixed_loop(self) -> float:
        """Return the processor time of the quickest of three rounds, some 12 us each: one may meet an interrupt."""
        quickest = math.inf
        for _ in range(3):
            began = time.thread_time()
            for _ in range(1000):
                pass
            quickest = min(quickest, time.thread_time() - began)
        return quickest

    # The configuration's rules let nobody ask a CPU for these.

    def start_capture(self, *, shapes: bool, ranges: bool) -> None:
        raise NotImplementedError("Nsight Systems traces GPUs")

    def stop_capture(self) -> None:
        raise NotImplementedError("Nsight Systems traces GPUs")

    def record_memory_history(self) -> None:
        raise NotImplementedError("a CPU has no allocator that remembers")

    def write_memory_history(self, path: str) -> None:
        raise NotImplementedError("a CPU has no allocator that remembers")


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Numbers of `mallopt`'s settings (malloc.h)."""

_KEPT = 1 << 30
"""Bytes that stay with the process although nothing uses them."""

_ON_THE_HEAP = 32 << 20
"""Bytes of the largest block that is kept; glibc takes no higher value on 64 bits."""

_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Set glibc's allocator so, unless the environment sets it; return whether that was done."""
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _OF_THE_USER):
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_TRIM_THRESHOLD, _KEPT) and libc.mallopt(_MMAP_THRESHOLD, _ON_THE_HEAP))
