"""Writes the zip archives of which a checkpoint's shards are made as `torch.save` does, and finds the elements in them,
without torch.

    head, tail = archive(tensor_pickle((1, 32, 64), "BF16"), 4096)     # the elements lie between the two
    place = place_of_elements(file, offset, length, (1, 32, 64), "BF16")

Importing torch takes as long as copying a gigabyte. The bytes equal the output of `torch.save` with its checksums
switched off (`torch.serialization.set_crc32_options(False)`): nobody reads these, and the manifest has one of every
file. A test compares the bytes with torch's.
"""

import math
import os
import pickle
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from megatron_ext.checkpoint.dtypes import WIDTH
from megatron_ext.untrusted import inert_pickle
from megatron_ext.untrusted.inert_pickle import Global

_STORAGES = {"F64": "DoubleStorage", "F32": "FloatStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage"}
_OF_TENSORS = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("collections", "OrderedDict"),
    *(("torch", name) for name in _STORAGES.values()),
}
_LARGEST_PICKLE = 1 << 20  # bytes; a tensor's has some 200
_LARGEST_TABLE = 1 << 26  # bytes; a record takes some 70
_ALIGNMENT = 64
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_DESCRIPTOR = struct.Struct("<4s3I")
_CENTRAL_HEADER = struct.Struct("<4s6H3I5H2I")
_ENDS = struct.Struct("<4sQ2H2I4Q4sIQI")  # of the table, where numbers may have 64 bits: and where that stands
_LOCATOR_SIZE = 20
_END = struct.Struct("<4s4H2IH")
_STORED = 0
_ENCRYPTED = 1
_FLAGS = 0x0808  # the sizes follow the data, and names are UTF-8
_LARGEST = (1 << 32) - 1  # beyond this, a zip file has other headers
# torch's fingerprint of an archive: a hash of the records' names, and one of the checksums, which are switched off.
_FINGERPRINTS = {True: b"1572819951185464302603005401530805769991", False: b"0290846867776292310400046082544174525093"}


def archive(pickled: bytes, size: int | None) -> tuple[bytes, bytes]:
    """Return the bytes of an archive before and behind `size` bytes of elements; with None, all of an archive that has
    no elements.

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
    """Return the end records of an archive whose table of `count` records, `size` bytes, lies at `position`."""
    return _ENDS.pack(
        *(b"PK\6\6", 44, 0x031E, 45, 0, 0, count, count, size, position), *(b"PK\6\7", 0, position + size, 1)
    ) + _END.pack(b"PK\5\6", 0, 0, count, count, size, position, 0)


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


def dtype_of_storage(kind: Global) -> str:
    """Return the dtype of weights, by its name in safetensors, of a class of storages; that class's name for others."""
    return next((code for code, name in _STORAGES.items() if kind == Global("torch", name)), kind.name)


def _tuple(numbers: Sequence[int]) -> bytes:
    items = b"".join(map(plain, numbers))
    return items + (b")", b"\x85", b"\x86", b"\x87")[len(numbers)] if len(numbers) < 4 else b"(" + items + b"t"


def place_of_elements(file: BinaryIO, offset: int, length: int, shape: tuple[int, ...], dtype: str) -> int | None:
    """Return the position at which the elements of a tensor begin that `torch.save` wrote into this range of a file.

    Returns:
        None where they are not all of one record and in order, or where it is another tensor.
    Raises:
        OSError: the file cannot be read.
    """
    try:
        records = _records(file, offset, length)
        at, size = records["data.pkl"]
        # zipfile would compare its checksum, which torch.save may have been told to leave out.
        if size > _LARGEST_PICKLE:
            return None
        content = os.pread(file.fileno(), size, _content(file, offset, at))
        stored, start, sizes, strides, *_ = inert_pickle.read(content, _OF_TENSORS, stored=True).args
        _, storage, key, _, _ = stored.place
        kind = dtype_of_storage(storage)
        at, size = records[f"data/{key}"]
        in_order = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
        whole = size == math.prod(shape) * WIDTH[dtype]
        if whole and (kind, start, tuple(sizes), list(strides)) == (dtype, 0, shape, in_order):
            return _content(file, offset, at)
    except OSError:
        raise
    except Exception:  # whatever it is, it is no such tensor
        pass
    return None


def find_records(path: Path) -> dict[str, tuple[int, int]]:
    """Return the position of each record's content in an archive, and its size in bytes, by the record's name.

    Raises:
        pickle.UnpicklingError: the file is no archive as `torch.save` writes them.
        OSError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            length = path.stat().st_size
            check_archive(file, 0, length)
            found = _records(file, 0, length)
            places = {name: (_content(file, 0, header), size) for name, (header, size) in found.items()}
    except struct.error:
        raise _no_archive() from None
    if any(at + size > length for at, size in places.values()):
        raise _no_archive()
    return places


def check_archive(file: BinaryIO, offset: int, length: int, most: int | None = None) -> None:
    """Require that this range of a file is an archive as `torch.save` writes them: torch's reader inflates compressed
    records, a thousandfold, before anybody sees their contents.

    Args:
        most: bytes of the largest that is taken: a file may claim to have many more than the disk holds of it.
    Raises:
        pickle.UnpicklingError: it is no such archive or too large, a record of it is compressed, or its records have
            more bytes than it has.
        OSError: the file cannot be read.
    """
    if most is not None and length > most:
        raise pickle.UnpicklingError(f"it has {length:,} bytes, where {most:,} are the most that are read")
    try:
        sizes = [size for _, size in _records(file, offset, length).values()]
    except (struct.error, IndexError, UnicodeDecodeError):
        raise _no_archive() from None
    if sum(sizes) > length:
        raise pickle.UnpicklingError(f"its records have {sum(sizes):,} bytes, of which the file holds {length:,}")


def _records(file: BinaryIO, offset: int, length: int) -> dict[str, tuple[int, int]]:
    """Return the offset of the header, in the range, and the size in bytes of every record, by its name without the
    archive's.

    zipfile finds the table of records by other rules than torch's reader where the two places that name it disagree;
    here they must agree.

    Raises:
        pickle.UnpicklingError, struct.error, IndexError, UnicodeDecodeError: as `check_archive` says.
    """
    tail_size = min(length, _ENDS.size + _END.size)
    tail = os.pread(file.fileno(), tail_size, offset + length - tail_size)
    *_, count, size, position, comment = _END.unpack(tail[-_END.size :])
    end = length - _END.size
    if tail[-_END.size - _LOCATOR_SIZE :].startswith(b"PK\6\7"):
        end -= _ENDS.size
        *_, count, size, position, _, _, located, _ = _ENDS.unpack(tail[: _ENDS.size])
        if located != end or not tail.startswith(b"PK\6\6"):
            raise _no_archive()
    is_archive = os.pread(file.fileno(), 4, offset) == b"PK\3\4" and tail[-_END.size :].startswith(b"PK\5\6")
    if not is_archive or comment or position + size != end or size > _LARGEST_TABLE:
        raise _no_archive()
    table, at, records = os.pread(file.fileno(), size, offset + position), 0, {}
    for _ in range(count):
        name, *record, at = _record(table, at)
        records[name] = tuple(record)
    if at != len(table) or len(records) != count:
        raise _no_archive()
    return records


def _record(table: bytes, at: int) -> tuple[str, int, int, int]:
    """Return name, offset and size of the record at a place of the table, and where the next one begins."""
    signature, *_, flags, method, _, _, _, packed, size, names, extras, comments, _, _, _, header = (
        _CENTRAL_HEADER.unpack_from(table, at)
    )
    at += _CENTRAL_HEADER.size
    name, extra = table[at : at + names].decode().partition("/")[2], table[at + names : at + names + extras]
    if signature != b"PK\1\2" or flags & _ENCRYPTED:
        raise _no_archive()
    if method != _STORED:
        raise pickle.UnpicklingError(f"its record {ascii(name)[:200]} is compressed, which torch.save never does")
    wide = _wide_numbers(extra)
    size, packed, header = (next(wide) if number == _LARGEST else number for number in (size, packed, header))
    if packed != size:
        raise _no_archive()
    return name, header, size, at + names + extras + comments


def _wide_numbers(extra: bytes) -> Iterator[int]:
    """Yield the numbers of a record that have 64 bits: its size, its size once more, the offset of its header; of
    these, those that its header has no room for."""
    while extra:
        kind, size = struct.unpack_from("<2H", extra)
        if kind == 1:
            yield from (number for (number,) in struct.iter_unpack("<Q", extra[4 : 4 + size // 8 * 8]))
        extra = extra[4 + size :]
    raise _no_archive()


def _no_archive() -> pickle.UnpicklingError:
    return pickle.UnpicklingError("it is no archive as torch.save writes them")


def _content(file: BinaryIO, offset: int, header: int) -> int:
    """Return the position in the file at which a record's content begins; its header lies at `header` bytes after
    `offset`."""
    *_, name, extra = _LOCAL_HEADER.unpack(os.pread(file.fileno(), _LOCAL_HEADER.size, offset + header))
    return offset + header + _LOCAL_HEADER.size + name + extra
