"""Reads and writes the safetensors format in place: a header, then the bytes of every tensor. This needs no torch.

    8 bytes    length of the header, little-endian
    header     JSON: name -> {"dtype", "shape", "data_offsets": [begin, end]}, perhaps "__metadata__"
    data       the tensors, without gap or overlap

The safetensors package writes a file from tensors that are all in memory. Here a tensor is a place in a file, of which
only the part that is copied is ever read or written. A header is checked before anything is believed.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_ext.checkpoint.dtypes import ARRAYS, SAFETENSORS_WIDTHS, converted
from megatron_ext.durable import check_space
from megatron_ext.errors import DataError
from megatron_ext.untrusted.text import load_json

if TYPE_CHECKING:
    import numpy.typing as npt

_LARGEST_HEADER = 32 << 20  # bytes; a file that claims more is damaged or hostile
_MOST_TENSORS = 200_000
_MOST_DIMENSIONS = 64
_LARGEST_NUMBER = 1 << 62


@dataclass(frozen=True)
class Entry:
    """A tensor in a file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the file."""

    @property
    def columns(self) -> tuple[int, ...]:
        """The last dimension, (columns,), or none of a vector. What lies before it are rows: a stack of matrices is
        one below the other."""
        return self.shape[1:][-1:]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.columns) * SAFETENSORS_WIDTHS[self.dtype]

    def offset_of(self, row: int) -> int:
        """Return the offset of a row in the file."""
        return self.offset + row * self.row_bytes

    def rows(self, start: int, count: int, *, writable: bool = False) -> "npt.NDArray":
        """Return a view of `count` rows in the file; bfloat16 are uint16."""
        import numpy as np

        mode, shape = "r+" if writable else "c", (count, *self.columns)
        return np.memmap(self.path, dtype=ARRAYS[self.dtype], mode=mode, offset=self.offset_of(start), shape=shape)

    def number(self) -> float:
        """Return the value of a tensor of one element."""

        return float(converted(self.rows(0, 1), self.dtype, "F32").flat[0])

    def set_number(self, value: float) -> None:
        """Write it."""
        import numpy as np

        self.rows(0, 1, writable=True)[:] = converted(np.array([value], np.float32), "F32", self.dtype)

    def whole(self, *, writable: bool = False) -> "npt.NDArray":
        """Return a view of all of it."""
        return self.rows(0, math.prod(self.shape[:-1] if self.columns else self.shape), writable=writable)


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of a file.

    Raises:
        DataError: the header is no safetensors header, or does not describe this file's bytes exactly.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _LARGEST_HEADER):
                raise _wrong(path, f"its header claims {length} bytes, of a file of {size}")
            header = file.read(length)
            if header.count(b"{") > _MOST_TENSORS + 1000:  # one for each: not worth a parser's seconds
                raise _wrong(path, f"its header names more than the {_MOST_TENSORS:,} tensors of any model")
            content = load_json(header)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise _wrong(path, f"its header is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise _wrong(path, "its header is not a JSON object")
    content.pop("__metadata__", None)
    if len(content) > _MOST_TENSORS:
        raise _wrong(path, f"its header names {len(content):,} tensors, more than the {_MOST_TENSORS:,} of any model")
    spans = [_span(path, name, entry) for name, entry in content.items()]
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            what = "overlaps the one before it" if begin < position else "leaves a gap before it"
            raise _wrong(path, f"tensor {name} at data offset {begin} {what}, which ends at {position}")
        position = end
    if position != size - 8 - length:
        raise _wrong(path, f"its tensors cover {position} of {size - 8 - length} data bytes; it may be cut short")
    return {
        name: Entry(path, content[name]["dtype"], tuple(content[name]["shape"]), 8 + length + begin)
        for begin, _, name in spans
    }


def create(
    path: Path, tensors: Mapping[str, Sequence[int]], dtype: str, others: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Entry]:
    """Make a file for tensors of these shapes. Their bytes are zero until they are written.

    Args:
        dtype: dtype of all tensors but `others`, name -> dtype.
    Raises:
        OSError: there is no space for the whole file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    dtypes = {name: others.get(name, dtype) for name in tensors}
    # Wide elements first: a reader that maps the file can have no element that begins in the middle of its width.
    for name in sorted(tensors, key=lambda name: -SAFETENSORS_WIDTHS[dtypes[name]]):
        end = position + math.prod(tensors[name]) * SAFETENSORS_WIDTHS[dtypes[name]]
        header[name] = {"dtype": dtypes[name], "shape": list(tensors[name]), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        # Allocating all of it would tell as well, but where the disk is memory, it writes everything twice.
        check_space(path, position)
        file.truncate(8 + len(text) + position)
    start = 8 + len(text)
    return {
        name: Entry(path, dtypes[name], tuple(shape), start + header[name]["data_offsets"][0])
        for name, shape in tensors.items()
    }


def _span(path: Path, name: str, entry: Any) -> tuple[int, int, str]:
    try:
        begin, end = entry["data_offsets"]
        shape, width = entry["shape"], SAFETENSORS_WIDTHS[entry["dtype"]]
        numbers = [begin, end, *shape] if len(shape) <= _MOST_DIMENSIONS else [-1]
        right = all(type(number) is int and 0 <= number <= _LARGEST_NUMBER for number in numbers)
        right = right and end - begin == math.prod(shape) * width
    except (TypeError, ValueError, KeyError):
        right = False
        begin = end = 0
    if not right:
        shown = json.dumps(entry)
        shown = shown if len(shown) <= 200 else f"{shown[:200]}..."
        raise _wrong(path, f"the entry of tensor {name[:200]} contradicts itself: {shown}")
    return begin, end, name


def _wrong(path: Path, why: str) -> DataError:
    return DataError(f"{path} is no whole safetensors file: {why}. Download or write it again.")
