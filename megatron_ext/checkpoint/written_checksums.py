"""Takes sizes and checksums of the files that the engine writes, while it writes them.

The engine gives every tensor to a transform of its stream (torch's hook for compression and the like), and all bytes of
a file pass through it: they need not be read again for the manifest. torch's own checksum of every tensor in its zip
archives, which nobody reads, is switched off meanwhile; it takes longer than ours.
"""

import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_ext.checkpoint.native.checkpoint_manifest import Files


class Checksums:
    """Stands in for torch's transform of a stream, around it.

    One thread writes a file, from its beginning to its end; several files may be written at once.
    """

    def __init__(self, inner: Any):
        self._inner = inner
        self._written: dict[str, tuple[int, int]] = {}

    def transform_save_stream(self, write_item: Any, raw_stream: Any) -> tuple[IO[bytes], list[str]]:
        """Return the stream for one tensor, by torch's interface."""
        return self._inner.transform_save_stream(write_item, _Watched(raw_stream, self._written))

    def files(self) -> Files:
        """Return sizes and checksums of the written files for the manifest, by the file's name."""
        return {
            Path(name).name: {"bytes": size, "crc32": f"{value:08x}"} for name, (size, value) in self._written.items()
        }


class _Watched(io.RawIOBase):
    """Passes on the bytes that are written, and counts them under the file's name."""

    def __init__(self, file: Any, written: dict[str, tuple[int, int]]):
        self._file, self._written = file, written
        written.setdefault(file.name, (0, 0))

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        count = self._file.write(data)
        assert count == memoryview(data).nbytes  # a buffered file takes everything, or raises
        size, value = self._written[self._file.name]
        self._written[self._file.name] = (size + count, zlib.crc32(data, value))
        return count

    def flush(self) -> None:
        self._file.flush()


def watch(request: AsyncRequest) -> Checksums:
    """Take the checksums of the files that megatron-core's writer will write on this rank."""
    if request.async_fn is None:  # this rank writes nothing
        return Checksums(None)
    transforms: Any = request.async_fn.args[0]  # pyright: ignore[reportFunctionMemberAccess]
    transforms[:] = [Checksums(transforms[0])]
    return transforms[0]


@contextmanager
def without_checksums_of_torch() -> Iterator[None]:
    """Switch torch's own checksums off inside."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
