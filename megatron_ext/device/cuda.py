"""The device of GPU processes, which communicate over NCCL. megatron-core is used as it is."""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_ext.device import nccl_choice, symmetric_memory
from megatron_ext.device.device_protocol import DeviceMemory

_MOST_ALLOCATIONS = 100_000  # as Megatron-LM keeps


class CopiesAside:
    """Implements `Copies` in a stream of its own."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._done = torch.cuda.Event()

    def copy(self, to: torch.Tensor, tensor: torch.Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            to.copy_(tensor, non_blocking=True)
        if tensor.device.type == "cuda":
            tensor.record_stream(self._stream)  # its memory may be given to nobody else before
        self._done.record(self._stream)

    def hold(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)

    def wait(self) -> None:
        self._done.synchronize()


class CudaDevice:
    """Implements `Device` for GPUs."""

    kind = "cuda"
    backend = "nccl"
    backend_with_host = "cpu:gloo,cuda:nccl"
    reads_wait = True

    def __init__(self, local_rank: int) -> None:
        self.torch_device = torch.device("cuda", local_rank)
        self.bind_thread()
        self.model_name = torch.cuda.get_device_name(local_rank)
        self._operators: torch.autograd.profiler.emit_nvtx | None = None

    def backend_text(self) -> str:
        return f"{self.backend} ({nccl_choice.in_use()})"

    def read_later(self, numbers: torch.Tensor) -> Callable[[], list[float]]:
        copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copied.copy_(numbers, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def read() -> list[float]:
            done.synchronize()
            return copied.tolist()

        return read

    def bind_thread(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def bind_group(self) -> None:
        torch.distributed.all_reduce(torch.zeros(1, device=self.torch_device))

    def compute_capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.torch_device)

    def lacks_for_overlap(self, group: ProcessGroup) -> str | None:
        return symmetric_memory.obstacle(group, self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def copies(self) -> CopiesAside:
        return CopiesAside()

    def memory(self) -> DeviceMemory:
        return DeviceMemory(
            allocated=torch.cuda.memory_allocated(),
            max_allocated=torch.cuda.max_memory_allocated(),
            reserved=torch.cuda.memory_reserved(),
        )

    def capacity(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info()
        return total, free

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)

    def start_capture(self, *, shapes: bool, ranges: bool) -> None:
        if ranges:
            self._name_ranges(True)
        torch.cuda.check_error(_runtime().cudaProfilerStart())
        if shapes:
            self._operators = torch.autograd.profiler.emit_nvtx(record_shapes=True)
            self._operators.__enter__()

    def stop_capture(self) -> None:
        torch.cuda.synchronize()  # kernels of the last step may still wait to run
        if self._operators is not None:
            self._operators.__exit__(None, None, None)
            self._operators = None
        torch.cuda.check_error(_runtime().cudaProfilerStop())
        self._name_ranges(False)

    @staticmethod
    def _name_ranges(on: bool) -> None:
        from megatron.core.utils import configure_nvtx_profiling

        configure_nvtx_profiling(on)

    def record_memory_history(self) -> None:
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=_MOST_ALLOCATIONS)

    def write_memory_history(self, path: str) -> None:
        torch.cuda.memory._dump_snapshot(path)

    def mark(self) -> torch.cuda.Event | None:
        if torch.cuda.current_stream() != torch.cuda.default_stream():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def has_passed(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def seconds_between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return first.elapsed_time(last) / 1000.0

    def seconds_run_between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        """Return all of the time: a rank has its GPU alone."""
        return self.seconds_between(first, last)

    def seconds_without_processor(self) -> float:
        """Return 0: a rank has its GPU alone."""
        return 0.0

    def seconds_of_a_fixed_loop(self) -> float:
        """Return 0: the GPU computes, whatever the host's core does."""
        return 0.0


def _runtime() -> Any:
    """Return CUDA's runtime library; torch's stubs think that it may be missing, which it is not where there is a
    GPU."""
    return torch.cuda.cudart()
