"""Files that survive a crash of the machine: a file's content is on the disk before it gets its name."""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write that has no room: on the disk, in a quota, under a limit on the size of files."""

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
    """Open a file for `open(path, mode, opener=only_files)`: a pipe, which another program may have put in its place,
    would be waited for without end.

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
def naming(path: str | Path, needed: int | None = None) -> Iterator[None]:
    """Add the file's name to a block's OSErrors that have none, such as errors of a write; if the disk is full, add the
    free bytes, too.

    Args:
        needed: bytes that the file needs, where that is known.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:  # none of the system's, or one that says it
            raise
        error.filename = str(path)
        if error.errno == errno.ENOSPC:
            folder = next(one for one in (Path(path).absolute(), *Path(path).absolute().parents) if one.is_dir())
            room = f"{_free(folder):,}"
            room = f"{room} bytes are free" if needed is None else f"{needed:,} bytes are needed, {room} are free"
            error.strerror = f"{os.strerror(errno.ENOSPC)} ({room})"
        raise


def check_space(path: Path, needed: int) -> None:
    """Check that the disk has room for a file, or for a folder's files: better than to find out in the middle of it.

    Raises:
        OSError: it does not.
    """
    folder = path if path.is_dir() else path.parent
    with naming(path, needed):
        if needed > _free(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _free(folder: Path) -> int:
    import shutil  # with it come archives of all kinds, which --help does not wait for

    return shutil.disk_usage(folder).free


def described(error: OSError) -> str:
    """Return the message about the error for a user; of a full disk also advice."""
    if error.errno not in FULL or error.filename is None:
        return str(error)
    return f"{error.filename} cannot be written: {error.strerror}; free space, or give another place"


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
        with naming(path):
            with temporary.open("xb") as file:
                yield file
                sync_file(file)
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_text(path: str | Path, text: str) -> None:
    """Write a text file, in UTF-8, in place of an older one in one step. A link stays, and the file that it leads to is
    replaced; a device, such as /dev/null, is written to.

    Raises:
        OSError: it cannot be written, or a folder or a pipe is in its place; the older file is as it was.
    """
    real = Path(path).resolve()
    if real.exists() and not real.is_file():
        with naming(path), open(real, "w", encoding="utf-8", opener=only_files) as device:
            device.write(text)
        return
    with naming(path), replacing(real) as file:
        file.write(text.encode())


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
