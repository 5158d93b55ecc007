"""Writes and finds what `torch.save` writes, without torch: the zip archives of which the shards of a checkpoint are
made.

    head, tail = archive(tensor_pickle((1, 32, 64), "BF16"), 4096)     # the elements lie between the two
    place = place_of_elements(file, offset, length, (1, 32, 64), "BF16")

Importing torch takes as long as copying a gigabyte. The bytes are those of `torch.save` with its checksums switched
off (`torch.serialization.set_crc32_options(False)`): nobody reads those, and the manifest has one of every file. A
test holds them to torch's.
"""

import io
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Sequence
from typing import Any, BinaryIO

from megatron_ext.checkpoint.dtypes import WIDTH
from megatron_ext.untrusted import inert_pickle
from megatron_ext.untrusted.inert_pickle import Global

_STORAGES = {"F64": "DoubleStorage", "F32": "FloatStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage"}
_OF_TENSORS = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    *(("torch", name) for name in _STORAGES.values()),
}
_LARGEST_PICKLE = 1 << 20  # bytes; that of a tensor has some 200
_ALIGNMENT = 64
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = struct.Struct("<4s3I")
_CENTRAL_HEADER = struct.Struct("<4s6H3I5H2I")
_FLAGS = 0x0808  # the sizes follow the data, and names are UTF-8
_LARGEST = (1 << 32) - 1  # beyond this, a zip file has other headers
# torch's fingerprint of an archive: a hash of the records' names, and one of the checksums, which are switched off.
_FINGERPRINTS = {True: b"1572819951185464302603005401530805769991", False: b"0290846867776292310400046082544174525093"}


def archive(pickled: bytes, size: int | None) -> tuple[bytes, bytes]:
    """Return what lies before and behind `size` bytes of elements; with None, all of an archive that has no elements.

    Args:
        pickled: the pickled object, or `tensor_pickle` of a tensor.
    """
    records: list[tuple[str, bytes | None]] = [
        ("data.pkl", pickled),
        (".format_version", b"1"),
        (".storage_alignment", str(_ALIGNMENT).encode()),
        ("byteorder", b"little"),
        *([] if size is None else [("data/0", None)]),
        ("version", b"3\n"),
        (".data/serialization_id", _FINGERPRINTS[size is not None]),
    ]
    parts, central = [bytearray()], bytearray()
    position = 0
    for name, content in records:
        path = f"archive/{name}".encode()
        length = size if content is None else len(content)
        assert length is not None
        assert position + length < _LARGEST, "chunks of a tensor are smaller"
        start = position
        parts[-1] += _LOCAL_HEADER.pack(b"PK\3\4", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(path), _padding(start, path))
        parts[-1] += path + b"FB" + struct.pack("<H", _padding(start, path) - 4)
        parts[-1] += b"Z" * (_padding(start, path) - 4)
        if content is None:
            parts.append(bytearray())
        else:
            parts[-1] += content
        parts[-1] += _DESCRIPTOR.pack(b"PK\7\x08", 0, length, length)
        position = sum(map(len, parts)) + (0 if len(parts) == 1 else size or 0)
        header = (b"PK\1\2", 0, 0, _FLAGS, 0, 0, 0, 0, length, length, len(path), 0, 0, 0, 0, 0, start)
        central += _CENTRAL_HEADER.pack(*header) + path
    parts[-1] += central + _end(len(records), len(central), position)
    return bytes(parts[0]), bytes(parts[1] if len(parts) > 1 else b"")


def _padding(start: int, path: bytes) -> int:
    """Return the bytes of a record's extra field, so that its content is aligned."""
    return 4 + -(start + _LOCAL_HEADER.size + len(path) + 4) % _ALIGNMENT


def _end(count: int, size: int, position: int) -> bytes:
    """Return what closes an archive whose table of `count` records lies at `position`."""
    return (
        struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, size, position)
        + struct.pack("<4sIQI", b"PK\6\7", 0, position + size, 1)
        + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, count, count, size, position, 0)
    )


def tensor_pickle(shape: Sequence[int], dtype: str) -> bytes:
    """Return the pickle of a tensor whose elements lie in order in the record `data/0`."""
    strides = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    storage = b"(X\7\0\0\0storageq\1ctorch\n%s\nq\2X\1\0\0\0000q\3X\3\0\0\0cpuq\4%stq\5Q"
    return (
        b"\x80\2ctorch._utils\n_rebuild_tensor_v2\nq\0"
        b"(%sK\0%sq\6%sq\7\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b."
        % (
            storage % (_STORAGES[dtype].encode(), plain(math.prod(shape))),
            _tuple(shape),
            _tuple(strides),
        )
    )


def plain(value: object) -> bytes:
    """Return the opcodes of a number, a text or None in a pickle of protocol 2."""
    return pickle.dumps(value, protocol=2)[2:-1]


def _tuple(numbers: Sequence[int]) -> bytes:
    items = b"".join(map(plain, numbers))
    return items + (b")", b"\x85", b"\x86", b"\x87")[len(numbers)] if len(numbers) < 4 else b"(" + items + b"t"


def place_of_elements(file: BinaryIO, offset: int, length: int, shape: tuple[int, ...], dtype: str) -> int | None:
    """Return where the elements of a tensor begin that `torch.save` wrote into this range of a file.

    Returns:
        None where they are not all of one record, uncompressed and in order, or where it is another tensor.
    Raises:
        OSError: the file cannot be read.
    """
    try:
        with zipfile.ZipFile(_FileRange(file, offset, length)) as opened:  # pyright: ignore[reportArgumentType]
            records = {info.filename.partition("/")[2]: info for info in opened.infolist()}
        pickled = records["data.pkl"]
        # zipfile would compare its checksum, which torch.save may have been told to leave out.
        if pickled.file_size > _LARGEST_PICKLE:
            return None
        content = os.pread(file.fileno(), pickled.file_size, _content(file, offset, pickled))
        stored, start, size, strides, *_ = inert_pickle.read(content, _OF_TENSORS, stored=True).args
        _, storage, key, _, _ = stored.place
        kind = next(code for code, name in _STORAGES.items() if storage == Global("torch", name))
        record = records[f"data/{key}"]
        in_order = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
        whole = record.file_size == math.prod(shape) * WIDTH[dtype] and record.compress_type == zipfile.ZIP_STORED
        if whole and (kind, start, tuple(size), list(strides)) == (dtype, 0, shape, in_order):
            return _content(file, offset, record)
    except OSError:
        raise
    except Exception:  # whatever it is, it is no such tensor
        pass
    return None


def _content(file: BinaryIO, offset: int, record: zipfile.ZipInfo) -> int:
    """Return where a record's content begins in the file."""
    header = os.pread(file.fileno(), _LOCAL_HEADER.size, offset + record.header_offset)
    *_, name, extra = _LOCAL_HEADER.unpack(header)
    return offset + record.header_offset + _LOCAL_HEADER.size + name + extra


class _FileRange(io.RawIOBase):
    """A range of a file, seen as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int):
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError("before the beginning")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        got = os.preadv(self._file.fileno(), [memoryview(buffer)[:count]], self._offset + self._position)
        self._position += got
        return got
