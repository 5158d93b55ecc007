"""The protocol of a device: its methods are all that the rest of the program calls."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of this rank, in bytes."""

    allocated: int
    max_allocated: int
    reserved: int


class Copies(Protocol):
    """Copies tensors into host memory while the device computes; a copy has the values after all earlier launches."""

    def copy(self, to: torch.Tensor, tensor: torch.Tensor) -> None:
        """Begin to copy a tensor into `to`, in host memory: pinned, if the tensor is on a GPU."""
        ...

    def hold(self) -> None:
        """Make all later launches begin after the copies are complete. The caller does not wait."""
        ...

    def wait(self) -> None:
        """Wait until the copies are complete; any thread may call it."""
        ...


class Device(Protocol):
    """A kind of hardware and how to use it."""

    kind: str
    """"cuda" or "cpu"."""

    torch_device: torch.device
    """Device on which parameters, activations and batches live."""

    backend: str
    """The torch.distributed backend that moves tensors of this device."""

    backend_with_host: str
    """Backend that moves tensors in host memory, too."""

    model_name: str
    """The hardware's own name, for the table of peak FLOP rates."""

    reads_wait: bool
    """Whether reading a number makes this process wait for work that it has given to the device, which then runs
    empty."""

    def backend_text(self) -> str:
        """Return the backend's name, and which implementation of it communicates where there are several."""
        ...

    def read_later(self, numbers: torch.Tensor) -> Callable[[], list[float]]:
        """Return a function that waits for the values of `numbers`, [N], at this moment, and not for later launches."""
        ...

    def bind_thread(self) -> None:
        """Make this the current device of the calling thread. A new thread begins with device 0, whatever the rank."""
        ...

    def bind_group(self) -> None:
        """Tell torch.distributed, which has just started, the device that this rank communicates from. Collective.

        A first barrier would otherwise guess: the rank modulo the machine's GPUs.
        """
        ...

    def compute_capability(self) -> tuple[int, int] | None:
        """Return a GPU's compute capability, major and minor; None on a CPU."""
        ...

    def lacks_for_overlap(self, group: ProcessGroup) -> str | None:
        """Return why the devices of this group cannot read each other's memory, which products that overlap with
        communication need; None if they can. The same on all ranks of the group. Collective."""
        ...

    def synchronize(self) -> None:
        """Wait until everything that was launched is done."""
        ...

    def copies(self) -> "Copies":
        """Return an object that copies into host memory while the training goes on."""
        ...

    def memory(self) -> DeviceMemory:
        """Return the memory in use now and at most."""
        ...

    def capacity(self) -> tuple[int, int]:
        """Return the total and the free bytes of memory; of a CPU, for all ranks of the machine."""
        ...

    def rng_state(self) -> torch.Tensor:
        """Return the state of the generator that dropout draws from."""
        ...

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state that `rng_state` returned."""
        ...

    def start_capture(self, *, shapes: bool, ranges: bool) -> None:
        """Begin a capture of Nsight Systems: with `shapes`, of operators and their shapes too; with `ranges`, of
        megatron-core's ranges."""
        ...

    def stop_capture(self) -> None:
        """End the capture of Nsight Systems."""
        ...

    def record_memory_history(self) -> None:
        """Record every allocation from now on, with its stack."""
        ...

    def write_memory_history(self, path: str) -> None:
        """Write the recorded allocations, for pytorch.org/memory_viz.

        Raises:
            OSError: the file cannot be written.
        """
        ...

    def mark(self) -> Any:
        """Return a mark of this moment in the order of this rank's computation; None on a stream other than the one
        that computes."""
        ...

    def has_passed(self, mark: Any) -> bool:
        """Return whether everything before a mark is done. It does not wait."""
        ...

    def seconds_between(self, first: Any, last: Any) -> float:
        """Return the seconds from one mark to another; both must have passed."""
        ...

    def seconds_run_between(self, first: Any, last: Any) -> float:
        """Return the seconds between two marks in which this rank had the processor that computes."""
        ...

    def seconds_without_processor(self) -> float:
        """Return how long the calling thread was ready to compute since it began, and others had the processor."""
        ...

    def seconds_of_a_fixed_loop(self) -> float:
        """Return how long the same few instructions take now on the core of the calling thread; 0 where that says
        nothing about this rank's computation."""
        ...
