"""Files that outlive a machine that goes down: what a name stands for is on the disk before it has the name."""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

_BLOCK = 1 << 20


def sync_file(file: IO[bytes] | IO[str]) -> None:
    """Wait until everything written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def only_files(path: str, flags: int) -> int:
    """Open a file for `open(path, mode, opener=only_files)`: a pipe, which somebody may have put in its place, would
    be waited for without end.

    Raises:
        OSError: it is neither a file nor a device as /dev/null, or cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe that nobody reads
            raise OSError(errno.EINVAL, "it is no file", path) from error
        raise
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind) or stat.S_ISCHR(kind):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no file", path)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Give the OSErrors of a block that say nothing of a file its name: those of a write do not know it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """Yield a new file that takes the place of `path` in one step when the block ends; a failure leaves `path` as it
    was.

    Args:
        temporary: the file's name until then, in the same folder; default `.<name>.tmp`. Processes that may write at
            the same time need names of their own.
    """
    temporary = path.with_name(f".{path.name}.tmp") if temporary is None else temporary
    temporary.unlink(missing_ok=True)  # left by a killed process; it may be a link
    try:
        with temporary.open("xb") as file:
            yield file
            sync_file(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def keep(path: Path, ranges: Iterable[tuple[int, int]]) -> None:
    """Keep only these ranges of bytes of a file, which are in order; one that is kept whole stays as it is."""
    kept: list[tuple[int, int]] = []
    for begin, end in ranges:
        if kept and kept[-1][1] == begin:
            begin = kept.pop()[0]
        kept.append((begin, end))
    if sum(end - begin for begin, end in kept) == path.stat().st_size:
        return
    with path.open("rb") as old, replacing(path) as new:
        for begin, end in kept:
            old.seek(begin)
            while begin < end:
                part = old.read(min(_BLOCK, end - begin))
                new.write(part)
                begin += len(part)
