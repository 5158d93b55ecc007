"""Reads a part of a saved tensor, and no more of the file than what lies between its first element and its last.

torch's reader unpickles the whole tensor each time, of which a rank may want a few rows: of a shard of a distributed
optimizer's state, one part in as many as there are ranks.
"""

import math
from collections.abc import Sequence
from typing import BinaryIO

import torch

from megatron_ext.checkpoint.dtypes import DTYPES, WIDTH
from megatron_ext.checkpoint.native.torch_archive import place_of_elements

_CODES = {getattr(torch, name): code for code, name in DTYPES.items()}


def place_of_tensor(file: BinaryIO, offset: int, length: int, shape: Sequence[int], dtype: torch.dtype) -> int | None:
    """Return where in the file the elements begin of a tensor that torch wrote there; None where it must read it
    itself.

    Raises:
        OSError: the file cannot be read.
    """
    code = _CODES.get(dtype)
    return None if code is None else place_of_elements(file, offset, length, tuple(shape), code)


def read_part(
    file: BinaryIO, offset: int, shape: Sequence[int], dtype: torch.dtype, begin: Sequence[int], lengths: Sequence[int]
) -> torch.Tensor | None:
    """Return the elements from `begin` on, `lengths` of them along each axis, of the tensor at `offset`.

    Returns:
        None where the file ends before them.
    Raises:
        OSError: the file cannot be read.
    """
    if 0 in lengths:
        return torch.empty(tuple(lengths), dtype=dtype)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    first = sum(index * stride for index, stride in zip(begin, strides, strict=True))
    count = 1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
    width = WIDTH[_CODES[dtype]]
    buffer = bytearray(count * width)
    file.seek(offset + first * width)
    if file.readinto(buffer) != len(buffer):  # pyright: ignore[reportAttributeAccessIssue]
        return None
    return torch.frombuffer(buffer, dtype=dtype).as_strided(tuple(lengths), strides)
