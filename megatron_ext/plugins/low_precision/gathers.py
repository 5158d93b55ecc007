"""Weights that are gathered in the eight bits in which they are multiplied (--fp8-param-gather).

A weight is rounded in the forward product, and its transpose in the input gradient. Where both have the same blocks,
the whole tensor or squares, both round to the same numbers, and one byte for each is all that a layer needs.
"""

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from megatron_ext.parallel.narrow import Narrow
from megatron_ext.plugins.low_precision.formats import Format
from megatron_ext.plugins.low_precision.quantize import Quantized, block_scales, largest_of_blocks, quantize


class EightBits(Narrow):
    """A weight in an FP8 format, or several of the same shape, stacked.

    Args:
        format: format of the weight in the forward product.
        shape: this rank's rows and columns, before them the number of stacked weights.
        over: the ranks that hold other parts of what has one scale.
    """

    def __init__(self, format: Format, shape: Sequence[int], over: Sequence[ProcessGroup]):
        self.format, self.over = format, over
        self._rows, self._columns = shape[-2:]
        self._number = shape[0] if len(shape) > 2 else 1
        block = format.block
        self._down, self._across = block.rows or self._rows, block.columns or self._columns

    def largest_of(self, own: torch.Tensor, start: int) -> torch.Tensor:
        """Return the largest absolute value of every block among these elements."""
        across = self._columns // self._across
        found = torch.zeros(self._number * self._rows // self._down, across, device=own.device)
        if len(own):
            strip, first = self._whole_blocks(own, start)
            found[first : first + len(strip) // self._down] = largest_of_blocks(strip, self._down, self._across)
        return found.view(-1)

    def narrowed(self, own: torch.Tensor, start: int) -> torch.Tensor:
        """Return the bytes of these elements."""
        if not len(own):
            return own.new_empty(0, dtype=torch.uint8)
        strip, first = self._whole_blocks(own, start)
        largest = self._grid()[first : first + len(strip) // self._down]
        values = quantize(strip, self.format, largest=largest).values_RC.view(torch.uint8).view(-1)
        begin = start - first * self._down * self._columns
        return values[begin : begin + len(own)]

    def quantized(self, index: int = 0) -> Quantized:
        """Return one of the stacked weights as the ranks have gathered it."""
        assert self.values is not None, "it was gathered in eight bits"
        values = self.values.view(getattr(torch, self.format.element.name))
        values_RC = values.view(self._number, self._rows, self._columns)[index]
        down = self._rows // self._down
        largest = self._grid()[index * down : (index + 1) * down]
        return Quantized(values_RC, block_scales(largest, self.format.element, self.format.scale), largest, self.format)

    def _grid(self) -> torch.Tensor:
        assert self.largest is not None, "the ranks have agreed on it"
        return self.largest.view(-1, self._columns // self._across)

    def _whole_blocks(self, own: torch.Tensor, start: int) -> tuple[torch.Tensor, int]:
        """Return the rows of blocks that these elements touch, with zeros for all others, and the index of the first.
        A shard begins and ends anywhere."""
        size = self._down * self._columns
        first, stop = start // size, -(-(start + len(own)) // size)
        padded = own.new_zeros((stop - first) * size)
        padded[start - first * size :][: len(own)] = own
        return padded.view(-1, self._columns), first
