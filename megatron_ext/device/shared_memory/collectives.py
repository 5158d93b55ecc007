"""What each collective writes into its slot and reads from it.

A slot has a row of bytes for each rank. Reductions and broadcasts read and write a tensor's memory from its first
element on, whatever its strides, as gloo does; where gloo copies element by element, it is done here, too.
"""

import ctypes
import functools
from collections.abc import Callable

import torch

from megatron_ext.device.shared_memory.channel import Channel, Collective
from megatron_ext.device.shared_memory.ring_order import COMBINE, MEAN, chunk, reduced

# Numbers of what is called, to tell when ranks call different things. The reductions' have the operation added.
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, BARRIER, ALL_TO_ALL = (16 * number for number in range(1, 7))


def _fill(output: torch.Tensor, write: Callable[[int], object]) -> None:
    """Call `write` with the address of an output's memory, or of one that is copied to it."""
    whole = output if output.is_contiguous() else output.new_empty(output.shape)
    write(whole.data_ptr())
    if whole is not output:
        output.data.copy_(whole)


class _Reduction(Collective):
    """Sums and the like: writes chunks into the rows that ring_order.py names."""

    def write(self) -> None:
        channel, given = self.channel, self.given[0]
        source, target = given.data_ptr(), channel.segment.address + self.start
        for row, begin, size in _moves(given.numel(), given.element_size(), channel.ranks, channel.rank):
            ctypes.memmove(target + row * self.row_size + begin, source + begin, size)

    def _combined(self, first: int, count: int) -> torch.Tensor:
        """Return elements of the result."""
        ranks, dtype = self.channel.ranks, self.given[0].dtype
        start = self.start + first * dtype.itemsize
        rows = self.channel.segment.rows(dtype, start, count, self.row_size)
        operation = self.call >> 48 & 15
        result = reduced(rows, COMBINE[operation])
        return result.div_(ranks) if operation == MEAN else result


@functools.lru_cache(maxsize=4096)
def _moves(count: int, size: int, ranks: int, rank: int) -> tuple[tuple[int, int, int], ...]:
    """Return of each chunk: the row that it goes to, its first byte, its bytes."""
    width, total = chunk(count, size, ranks) * size, count * size
    numbers = range(-(-total // width))
    return tuple(((n - rank) % ranks, n * width, min(width, total - n * width)) for n in numbers)


class AllReduce(_Reduction):
    """Combines tensors, on all ranks."""

    def __init__(self, channel: Channel, tensor: torch.Tensor, operation: int):
        super().__init__(channel, "all_reduce", ALL_REDUCE + operation, tensor.nbytes, [tensor], [tensor])

    def read(self) -> None:
        tensor = self.given[0]
        result = self._combined(0, tensor.numel())
        ctypes.memmove(tensor.data_ptr(), result.data_ptr(), tensor.nbytes)


class ReduceScatter(_Reduction):
    """Combines tensors, each rank a part."""

    def __init__(self, channel: Channel, output: torch.Tensor, given: torch.Tensor, operation: int):
        code = REDUCE_SCATTER + operation
        given = given.contiguous()
        super().__init__(channel, "reduce_scatter_base", code, given.nbytes, [output], [given])

    def read(self) -> None:
        output = self.tensors[0]
        count = output.numel()
        result = self._combined(self.channel.rank * count, count)
        _fill(output, lambda target: ctypes.memmove(target, result.data_ptr(), output.nbytes))


class _Rows(Collective):
    """Each rank writes one tensor into its row."""

    def write(self) -> None:
        given = self.given[0]
        row = self.channel.segment.address + self.start + self.channel.rank * self.row_size
        ctypes.memmove(row, given.data_ptr(), given.nbytes)

    def _gather(self, size: int, first: int, target: int) -> None:
        """Copy `size` bytes of each row, from byte `first` on, to an address, one after the other."""
        source = self.channel.segment.address + self.start + first
        for rank in range(self.channel.ranks):
            ctypes.memmove(target + rank * size, source + rank * self.row_size, size)


class AllGather(_Rows):
    """Gathers tensors into one, in the order of ranks."""

    def __init__(self, channel: Channel, output: torch.Tensor, given: torch.Tensor):
        super().__init__(channel, "all_gather_base", ALL_GATHER, given.nbytes, [output], [given.contiguous()])

    def read(self) -> None:
        _fill(self.tensors[0], functools.partial(self._gather, self.given[0].nbytes, 0))


class AllGatherList(_Rows):
    """Gathers tensors into a list."""

    def __init__(self, channel: Channel, outputs: list[torch.Tensor], given: torch.Tensor):
        super().__init__(channel, "all_gather", ALL_GATHER, given.nbytes, [outputs], [given.contiguous()])
        self.size = given.nbytes

    def read(self) -> None:
        source = self.channel.segment.address + self.start
        for rank, output in enumerate(self.tensors[0]):
            _fill(output, lambda target, rank=rank: ctypes.memmove(target, source + rank * self.row_size, self.size))


class AllToAll(_Rows):
    """Exchanges equal parts: part p of rank r becomes part r of rank p."""

    def __init__(self, channel: Channel, output: torch.Tensor, given: torch.Tensor):
        super().__init__(channel, "all_to_all", ALL_TO_ALL, given.nbytes, [output], [given.contiguous()])

    def read(self) -> None:
        size = self.given[0].nbytes // self.channel.ranks
        _fill(self.tensors[0], functools.partial(self._gather, size, self.channel.rank * size))


class Broadcast(Collective):
    """Copies one rank's tensor to all. That rank waits for nobody."""

    def __init__(self, channel: Channel, tensor: torch.Tensor, root: int):
        super().__init__(channel, "broadcast", BROADCAST, tensor.nbytes, [tensor], [tensor], source=root)

    def write(self) -> None:
        if self.channel.rank == self.source:
            tensor = self.given[0]
            ctypes.memmove(self.channel.segment.address + self.start, tensor.data_ptr(), tensor.nbytes)

    def read(self) -> None:
        if self.channel.rank != self.source:
            tensor = self.given[0]
            ctypes.memmove(tensor.data_ptr(), self.channel.segment.address + self.start, tensor.nbytes)


class Barrier(Collective):
    """Waits for all ranks."""

    def __init__(self, channel: Channel):
        super().__init__(channel, "barrier", BARRIER, 0, [], [])
