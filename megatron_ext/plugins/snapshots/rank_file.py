"""The file that holds one rank's snapshot. No pickle, and nothing in it is run.

    bytes 0-7     MXSNAP01
    bytes 8-15    length of the header, little-endian
    header        JSON, padded with spaces: {"iteration", "layout", ..., "tensors": [[name, dtype, shape, begin]]}
    data          the tensors, each from a multiple of 64 bytes on
    last 4 bytes  CRC-32 of all that comes before

A file is written under another name and renamed, so that what has the name is complete. It is not flushed to a disk:
the folder is meant to lie in memory, and what a machine that goes down loses, a copy in another one or the checkpoint
has.
"""

import errno
import json
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from megatron_ext.durable import only_files
from megatron_ext.errors import DataError
from megatron_ext.untrusted.text import load_json

_MAGIC = b"MXSNAP01"
_ALIGNMENT = 64
_LARGEST_HEADER = 1 << 28
_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")
_CHUNK = 1 << 24
_REMEDY = "remove the folder to go on from the checkpoint in --load"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
} | {"int8": torch.int8, "int16": torch.int16, "bool": torch.bool}


def write(path: Path, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> int:
    """Write a snapshot, and give it its name; return its size in bytes.

    Args:
        facts: plain data for the header.
        tensors: in host memory.
    Raises:
        OSError: there is no room, or the folder cannot be written.
    """
    listed, end = [], 0
    for name, tensor in tensors.items():
        listed.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end])
        end = _aligned(end + tensor.numel() * tensor.element_size())
    header = json.dumps({**facts, "tensors": listed}).encode()
    header += b" " * (_aligned(16 + len(header)) - 16 - len(header))
    temporary = path.with_name(f"{path.name}.partial")
    try:
        with open(temporary, "wb", buffering=0, opener=only_files) as file:
            crc = _write_counted(file.write, (_MAGIC + _LENGTH.pack(len(header)) + header, *_pieces(tensors)))
            _write_all(file.write, _CRC.pack(crc))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return path.stat().st_size


def read_header(path: Path) -> dict[str, Any] | None:
    """Return the header; None where the file is none of ours or not whole. Its checksum is not looked at."""
    try:
        with _opened(path) as file:
            begin = file.read(16)
            length = _LENGTH.unpack(begin[8:])[0] if begin[:8] == _MAGIC else 0
            header = load_json(file.read(length)) if 0 < length <= _LARGEST_HEADER else None
            return header if isinstance(header, dict) else None
    except (OSError, ValueError, struct.error):
        return None


def is_intact(path: Path) -> bool:
    """Return whether the file is as it was written, by its checksum."""
    try:
        crc, left = 0, path.stat().st_size - _CRC.size
        with _opened(path) as file:
            while left > 0 and (chunk := file.read(min(left, _CHUNK))):
                crc, left = zlib.crc32(chunk, crc), left - len(chunk)
            return left == 0 and file.read() == _CRC.pack(crc)
    except OSError:
        return False


def restore(path: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Copy the tensors of an intact file into tensors of the same names and shapes, wherever they lie.

    Raises:
        DataError: the file holds other tensors.
    """
    listed = _listed(path)
    wanted = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in into.items()}
    different = sorted(
        name for name in listed.keys() | wanted.keys() if listed.get(name, (None, None))[:2] != wanted.get(name)
    )
    if different:
        raise DataError(
            f"the snapshot {path} is of another run: {len(different)} of its tensors differ, {different[0]} the first; "
            f"{_REMEDY}"
        )
    with _opened(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        begin = 16 + _LENGTH.unpack(content[8:16])[0]
        ends = {name: begin + listed[name][2] + tensor.numel() * tensor.element_size() for name, tensor in into.items()}
        if max(ends.values(), default=0) > len(content) - _CRC.size:
            raise DataError(f"the snapshot {path} is shorter than its header says; {_REMEDY}")
        for name, tensor in into.items():
            if tensor.numel():
                _copy(content, begin + listed[name][2], tensor)


def _listed(path: Path) -> dict[str, tuple[str, list[int], int]]:
    """Return each tensor's type, shape and first byte, as the header says."""
    entries = (read_header(path) or {}).get("tensors")
    tensors = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        match entry:
            case [str(name), str(dtype), list(shape), int(begin)] if begin >= 0:
                tensors[name] = dtype, shape, begin
            case _:
                raise DataError(f"the snapshot {path} has a header that none of ours has; {_REMEDY}")
    return tensors


def _opened(path: Path) -> IO[bytes]:
    """Open a regular file; a pipe, for which nobody may ever write, is refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def _copy(content: mmap.mmap, begin: int, tensor: torch.Tensor) -> None:
    # A copy, since the file is mapped to be read only, and must not stay mapped.
    copied = bytearray(content[begin : begin + tensor.numel() * tensor.element_size()])
    with torch.no_grad():
        tensor.copy_(torch.frombuffer(copied, dtype=tensor.dtype).view(tensor.shape))


def _pieces(tensors: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    for tensor in tensors.values():
        size = tensor.numel() * tensor.element_size()
        if size:
            yield memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        yield bytes(_aligned(size) - size)


def _write_counted(write: Callable[[Any], int | None], pieces: Any) -> int:
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
        _write_all(write, piece)
    return crc


def _write_all(write: Callable[[Any], int | None], piece: Any) -> None:
    left = memoryview(piece)
    while left.nbytes:
        left = left[write(left) or 0 :]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
