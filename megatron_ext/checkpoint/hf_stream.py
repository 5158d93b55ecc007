"""Moving gigabytes through one process: each byte is read once and written once.

Buffers are used again and again (fresh memory costs as much as the copy), and a second thread computes the CRC-32 of
what is being written while the kernel copies it: both leave Python's lock.
"""

import io
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.serialization
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_ext.checkpoint import manifest

_LOCAL_HEADER = 30  # bytes of a zip file's local header; the lengths of the name and of the extra field end it
_LARGE = 1 << 20


class Buffer:
    """Memory for one tensor at a time: asking for the next one gives up the one before."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialized tensor whose storage is exactly its own."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        return torch.frombuffer(self._memory.numpy(), dtype=dtype, count=size // dtype.itemsize).view(shape)


def read_into(file: BinaryIO, offset: int, tensor: torch.Tensor) -> None:
    """Fill a contiguous tensor from a file.

    Raises:
        EOFError: the file ends before it is full.
    """
    target = memoryview(tensor.view(-1).view(torch.uint8).numpy())
    while target:
        count = os.preadv(file.fileno(), [target], offset)
        if count == 0:
            raise EOFError(f"the file ends at {offset}, {len(target)} bytes too early")
        target, offset = target[count:], offset + count


class HashingWriter(FileSystemWriter):
    """torch's writer of a checkpoint folder; `files` then has size and checksum of what it wrote, for the manifest."""

    def __init__(self, folder: Path):
        super().__init__(folder, sync_files=False)
        self.files: manifest.Files = {}
        self.fs = _HashingFiles(self.files)


class _HashingFiles(FileSystem):
    def __init__(self, files: manifest.Files):
        self._files = files

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with Path(path).open(mode, buffering=0) as file:
            if "w" not in mode:
                yield file
                return
            with ThreadPoolExecutor(1) as executor:
                stream = _HashingStream(file, executor)
                yield stream
                name = Path(path).name.removesuffix(".tmp")  # torch renames the metadata when it is whole
                self._files[name] = {"bytes": stream.tell(), "crc32": f"{stream.value:08x}"}


class _HashingStream(io.RawIOBase):
    def __init__(self, file: Any, executor: ThreadPoolExecutor):
        self._file, self._executor = file, executor
        self.value = 0
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def fileno(self) -> int:
        return self._file.fileno()

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        checksum: Future[int] | None = None
        if len(view) >= _LARGE:
            checksum = self._executor.submit(zlib.crc32, view, self.value)
        rest = view
        while rest:
            rest = rest[self._file.write(rest) :]
        self.value = zlib.crc32(view, self.value) if checksum is None else checksum.result()
        self._position += len(view)
        return len(view)


@contextmanager
def without_zip_checksums() -> Iterator[None]:
    """torch.save computes no CRC-32 inside: nobody reads it, and the manifest has one of every file."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def read_saved_tensor(
    file: Any, offset: int, length: int, shape: tuple[int, ...], dtype: torch.dtype, buffer: Buffer
) -> torch.Tensor:
    """A tensor that torch.save wrote into a stretch of a file: straight into the buffer, where it lies there in order.

    Raises:
        OSError, RuntimeError, EOFError, pickle.UnpicklingError: it cannot be read, or is another tensor.
    """
    place = _place_of_data(file, offset, length, shape, dtype)
    if place is None:
        view: Any = _create_file_view(file, offset, length)
        tensor = torch.load(view, map_location="cpu", weights_only=True)
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise RuntimeError(f"{tensor.dtype} {list(tensor.shape)} instead of {dtype} {list(shape)}")
        return tensor
    tensor = buffer.tensor(shape, dtype)
    read_into(file, place, tensor)
    return tensor


def _place_of_data(file: Any, offset: int, length: int, shape: tuple[int, ...], dtype: torch.dtype) -> int | None:
    """Where the elements begin; None where they are not all of one record, uncompressed and in order."""
    view: Any = _create_file_view(file, offset, length)
    try:
        with zipfile.ZipFile(view) as archive:
            records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            described = _Layout(io.BytesIO(archive.read(records["data.pkl"]))).load()
            (_, kind, key, _, _), start, size, stride, *_ = described
            record = records[f"data/{key}"]
    except (zipfile.BadZipFile, pickle.UnpicklingError, KeyError, ValueError, TypeError):
        return None
    in_order = torch.empty(shape, device="meta").stride()
    wanted = torch.Size(shape).numel() * dtype.itemsize
    whole = record.file_size == wanted and record.compress_type == zipfile.ZIP_STORED
    if not (whole and kind == dtype and start == 0 and tuple(size) == shape and tuple(stride) == in_order):
        return None
    header = bytearray(_LOCAL_HEADER)
    os.preadv(file.fileno(), [header], offset + record.header_offset)
    name, extra = struct.unpack_from("<HH", header, _LOCAL_HEADER - 4)
    return offset + record.header_offset + _LOCAL_HEADER + name + extra


class _Layout(pickle.Unpickler):
    """Of a pickled tensor: (storage, first element, shape, strides, ...), as torch describes it; nothing is made."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *described: described
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return dict
        if module_name == "torch" and global_name in _STORAGES:
            return _STORAGES[global_name]
        raise pickle.UnpicklingError(f"{module_name}.{global_name}")

    def persistent_load(self, pid: Any, /) -> Any:
        return pid


_STORAGES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
}
