"""Where the files of a pair are: next to each other on this machine, or behind a URL of fsspec.

    --data-path s3://bucket/corpus_text_document

Of a pair behind a URL, the index (and a mask and a manifest) is copied once into a folder of this machine,
$XDG_CACHE_HOME/megatron_ext (default ~/.cache/megatron_ext), under a name that changes with the content; the tokens
are read where they lie, by ranges. No torch here.
"""

import fcntl
import hashlib
import os
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

from megatron_ext.config.parse.blend import is_url
from megatron_ext.data.remote import RemoteFile
from megatron_ext.data.threads import DaemonThreads
from megatron_ext.durable import only_files, replacing
from megatron_ext.errors import StorageError

_COPIED = 1 << 23  # bytes fetched at a time
_THREADS = 16


def cache_root() -> Path:
    """Return the folder of this machine for files of data behind a URL."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_ext"


def exists(prefix: str, suffix: str) -> bool:
    """Return whether a file of a pair exists, without copying it. Raises StorageError."""
    return RemoteFile(prefix + suffix).exists() if is_url(prefix) else os.path.isfile(prefix + suffix)


def local_file(prefix: str, suffix: str) -> Path:
    """Return the path on this machine of a file of a pair, copied from the store if it was not copied before.

    Args:
        prefix: path or URL of the pair, without suffix.
        suffix: `.idx`, `.mask` or `_manifest.json`.

    Returns:
        A path at which nothing lies if there is no such file.

    Raises:
        StorageError: the store cannot be read, or the folder not be written.
    """
    return _copied(prefix + suffix) if is_url(prefix) else Path(prefix + suffix)


@cache
def _copied(url: str) -> Path:
    """Return the copy of a file, made by whichever process of this machine comes first."""
    file, name = RemoteFile(url), url.rsplit("/", 1)[-1]
    if not file.exists():
        return cache_root() / "absent" / name
    digest = hashlib.sha256(f"{url}\0{file.size}\0{file.version}".encode()).hexdigest()[:24]
    folder = cache_root() / digest
    path = folder / name
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "lock", "w", opener=only_files) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another rank may be copying it
            if not path.exists():
                with replacing(path) as out:
                    for offset in range(0, file.size, _COPIED):
                        out.write(file.read(offset, _COPIED))
                    file.check_unchanged()
    except OSError as error:
        raise StorageError(
            f"{url} cannot be copied to {folder}: {error.strerror} ({error.filename}). Free space or fix what is wrong "
            "there, or name another folder in XDG_CACHE_HOME."
        ) from error
    return path


class BinFile(Protocol):
    """The tokens of a pair as bytes. Reading is safe in several threads."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, or less at the end of the file."""
        ...


class _LocalBin:
    def __init__(self, path: str):
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    @property
    def size(self) -> int:
        return os.fstat(self._file).st_size

    def read(self, offset: int, length: int) -> bytes:
        # Not a memory map: that would end the process by a signal where the file has become shorter.
        return os.pread(self._file, length, offset)


def open_bin(prefix: str) -> BinFile:
    """Open the .bin of a pair. Raises OSError, or StorageError for one behind a URL."""
    return RemoteFile(f"{prefix}.bin") if is_url(prefix) else _LocalBin(f"{prefix}.bin")


def read_many(prefix: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return several ranges (offset, length) of a .bin; from a store they are read in parallel."""
    file = open_bin(prefix)
    if not is_url(prefix):
        return [file.read(*one) for one in ranges]
    threads = DaemonThreads(_THREADS, "ranges")
    try:
        return [one.result() for one in [threads.submit(lambda one=one: file.read(*one)) for one in ranges]]
    finally:
        threads.close()
