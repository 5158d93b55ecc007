"""Files behind a URL (s3://, gs://, hf://datasets/..., memory://), read by ranges through fsspec.

    file = RemoteFile("s3://bucket/corpus.jsonl")
    file.read(0, 1024)              # tried again where the store or the link fails
    RemoteStream(file)              # a stream that reads ahead

fsspec comes with torch; s3:// needs the package s3fs, gs:// gcsfs, hf:// huggingface_hub, which find the credentials
as they always do. No torch here.
"""

import io
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property
from typing import Any

from megatron_ext.data.threads import DaemonThreads
from megatron_ext.errors import ConfigurationError, DataError, StorageError

_PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # seconds between two tries
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotImplementedError, ImportError, TypeError)
_BLOCK = 1 << 22
_KEPT = 8  # blocks
_AHEAD = 4  # blocks

sleep = time.sleep
"""Waits between two tries; replaced by tests."""


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it.

    Raises:
        ConfigurationError: fsspec, or the package for this kind of URL, is not installed, or there is no such kind.
    """
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"{url} cannot be read: {error}; pip install the package, or copy the data") from error


def tried_again[T](what: str, function: Callable[[], T]) -> T:
    """Call `function` up to seven times in half a minute, until it succeeds, and return its result.

    Raises:
        StorageError: it failed each time, or with an error that another try cannot change.
    """
    for pause in (*_PAUSES, None):
        try:
            return function()
        except (ConfigurationError, DataError):
            raise
        except Exception as error:  # each library has errors of its own for a link that fails
            if isinstance(error, _FINAL):
                raise StorageError(f"{what}: {type(error).__name__}: {error}. Check the name and the access") from error
            if pause is None:
                raise StorageError(
                    f"{what} failed {len(_PAUSES) + 1} times in {sum(_PAUSES):.0f} seconds: {type(error).__name__}: "
                    f"{error}. Start again when the store answers: the same command goes on"
                ) from error
            sleep(pause)
    raise AssertionError


def entry(what: str, system: Any, path: str) -> dict[str, Any] | None:
    """Return the store's metadata of a file or folder; None if it does not exist. Raises StorageError.

    fsspec's own `exists` and `isdir` say no as well where the store does not answer.
    """

    def look() -> dict[str, Any] | None:
        try:
            return system.info(path)
        except FileNotFoundError:
            return None

    return tried_again(what, look)


class RemoteFile:
    """One file of a store.

    Args:
        url: where it is.

    Raises:
        ConfigurationError: a package is missing.
    """

    def __init__(self, url: str):
        self.url = url
        self._system, self._path = file_system(url)

    @cached_property
    def info(self) -> dict[str, Any]:
        """The store's metadata of the file, asked for once. Raises StorageError."""
        return self._asked()

    def exists(self) -> bool:
        """Return whether there is such a file. Raises StorageError."""
        return entry(self.url, self._system, self._path) is not None

    def _asked(self) -> dict[str, Any]:
        listed = entry(self.url, self._system, self._path)
        if listed is None:
            raise StorageError(f"{self.url}: there is no such file. Check the name and the access")
        return listed

    @property
    def size(self) -> int:
        """Size in bytes."""
        return int(self.info["size"])

    @property
    def version(self) -> str:
        """ETag, checksum or time that tells this content from a later one of this name; empty if the store has none."""
        return _version(self.info)

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, or less at the end of the file. Safe in several threads.

        Raises:
            StorageError: the store does not give them.
        """
        end = min(offset + length, self.size)
        if end <= offset:
            return b""
        return tried_again(f"{self.url}, bytes {offset} to {end}", lambda: self._once(offset, end))

    def _once(self, offset: int, end: int) -> bytes:
        content = self._system.cat_file(self._path, start=offset, end=end)
        if len(content) != end - offset:
            raise OSError(f"{len(content)} bytes came instead of {end - offset}")
        return content

    def check_unchanged(self) -> None:
        """Ask the store again. Raises DataError where the file is another one by now."""
        self._system.invalidate_cache()
        now = self._asked()
        if (int(now["size"]), _version(now)) != (self.size, self.version):
            raise DataError(f"{self.url} was replaced while it was read; start again, with files that stay as they are")


def _version(info: dict[str, Any]) -> str:
    names = ("ETag", "etag", "md5Hash", "md5", "blob_id", "sha256", "LastModified", "mtime", "updated", "created")
    return next((str(info[name]) for name in names if info.get(name)), "")


class RemoteStream(io.RawIOBase):
    """A stream over a file, which can seek; where it is read from front to back, the next blocks are on their way."""

    def __init__(self, file: RemoteFile):
        self._file = file
        self._position = 0
        self._blocks: OrderedDict[int, Future[bytes]] = OrderedDict()
        self._last = -1
        self._threads = DaemonThreads(_AHEAD, "remote-stream")

    def readable(self) -> bool:
        """Return True: this is a stream to read from."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a position and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with the next bytes, at most to the end of a block, and return their number."""
        number, inside = divmod(self._position, _BLOCK)
        if self._position >= self._file.size:
            return 0
        block = self._block(number)
        part = memoryview(block)[inside : inside + len(memoryview(buffer))]
        memoryview(buffer)[: len(part)] = part
        self._position += len(part)
        return len(part)

    def _block(self, number: int) -> bytes:
        follows = number in (self._last, self._last + 1)
        self._last = number
        last = (self._file.size - 1) // _BLOCK
        for one in range(number, min(number + (_AHEAD if follows else 0), last) + 1):
            if one not in self._blocks:
                self._blocks[one] = self._threads.submit(lambda one=one: self._file.read(one * _BLOCK, _BLOCK))
        self._blocks.move_to_end(number)
        while len(self._blocks) > _KEPT:
            self._blocks.popitem(last=False)[1].cancel()
        return self._blocks[number].result()

    def close(self) -> None:
        """Drop the blocks that were read ahead."""
        self._blocks.clear()
        self._threads.close()
        super().close()
