"""Sums, maxima and minima over ranks in gloo's order, so that the bits are gloo's.

gloo divides a tensor of n elements into as many chunks as there are ranks, d, and passes each along a ring: chunk c
starts as rank c - 1's, to which rank c - 2 adds its own, then rank c - 3, and so on down to rank c (`ring` in
gloo/allreduce.cc; a rank adds what it receives to its own). Floating-point sums depend on the order, so that it is
repeated here. Rank r writes its chunk c into row (c - r) modulo d: then row 1 starts everywhere, rows 2, 3, ... d - 1
follow, and row 0 is last. torch's gloo scatters sums by summing everything, so that the same holds for them. A NaN is a
NaN in both, but where several meet its sign and payload may differ.
"""

from collections.abc import Callable

import torch
from torch.distributed import ReduceOp

_LARGEST_SEGMENT = 1 << 20  # bytes; gloo's


def chunk(count: int, size: int, ranks: int) -> int:
    """Return the elements of a chunk; the last ones may have fewer, or none.

    Args:
        count: elements of the tensor.
        size: bytes of an element.
    """
    total = count * size
    segments = max(_divided_up(total, size * max(1, _LARGEST_SEGMENT // size)), 2 * ranks)
    segments = ranks * _divided_up(segments, ranks)
    return _divided_up(_divided_up(total, segments), size) * (segments // ranks)


def reduced(rows: list[torch.Tensor], combine: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return the rows combined, as a new tensor.

    Args:
        rows: see above; at least two.
    """
    result = rows[1]
    for row in (*rows[2:], rows[0]):
        result = combine(row, result)
    return result


def _larger(own: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Return C++'s std::max, as gloo has it: of two that do not compare, the first."""
    return torch.where(own < received, received, own)


def _smaller(own: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """Return C++'s std::min."""
    return torch.where(received < own, received, own)


_NUMBERS = {name: number.value for name, number in ReduceOp.RedOpType.__members__.items()}
# By the operation's number, which is the same in its two Python types. Means are divided sums.
COMBINE: dict[int, Callable[..., torch.Tensor]] = {
    _NUMBERS["SUM"]: torch.add,
    _NUMBERS["AVG"]: torch.add,
    _NUMBERS["MAX"]: _larger,
    _NUMBERS["MIN"]: _smaller,
}
MEAN = _NUMBERS["AVG"]

DTYPES = frozenset(
    (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64)
)
"""Types that gloo combines and this file does alike. A bool's sum has bits of its own in gloo."""


def _divided_up(number: int, divisor: int) -> int:
    return -(-number // divisor)
