"""Lets one job at a time write into a save folder. This needs no torch.

The lock is the kernel's, on `SAVE/.lock`, and goes with the process that holds it, however that ends: a killed job
leaves nothing to clean up. The file's content says who it is, and has a random name of the folder's contents, by which
snapshots in a machine's memory (`plugins/snapshots`) know that they belong to it: a folder of the same path may have
been removed and begun anew. The lock is of POSIX's kind (`lockf`), which works over NFS and which the helper processes
that a job forks do not inherit.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import stat
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from megatron_ext import environment
from megatron_ext.errors import ConfigurationError, StorageError
from megatron_ext.terminal import warn
from megatron_ext.untrusted.text import load_json

LOCK = ".lock"
_LARGEST = 1000  # characters

_open: list[IO[str]] = []  # all of them: to close one of a file gives up every lock of this process on that file
_held: dict[str, IO[str]] = {}
_contents: dict[str, str] = {}
_TAKEN = (errno.EACCES, errno.EAGAIN)


def hold_until_exit(folder: str | Path) -> None:
    """Lock `folder` for this process, until it ends; the folder is made where it is missing.

    Raises:
        ConfigurationError: another job holds it.
        StorageError: the folder cannot be made or written.
    """
    path = Path(folder) / LOCK
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _opened(path)
    except OSError as error:
        raise StorageError(
            f"--save {folder}: {error.strerror}. Fix the folder's permission, or give another one."
        ) from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            raise ConfigurationError(_refusal(folder, file)) from None
        warn(f"{folder} cannot be locked ({error.strerror}): start no second job there")
    _open.append(file)
    _held[os.path.realpath(folder)] = file
    try:
        contents = _contents_name(path, file)
        file.truncate(0)
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": _now(), "contents": contents}
        file.write(json.dumps(holder) + "\n")
        file.flush()
        _contents[os.path.realpath(folder)] = contents
    except OSError as error:
        raise StorageError(
            f"--save {folder}: {path} cannot be written: {error.strerror}. Make room there, or give another folder."
        ) from error


def hold_again(folder: str | Path) -> None:
    """Lock a folder again that somebody has removed, or whose lock somebody has, since this process locked it.

    Raises:
        ConfigurationError, StorageError: as `hold_until_exit`.
    """
    if not is_lost(folder):
        return
    warn(f"--save {folder} or its {LOCK} was removed while this job is at work there: earlier files may be gone")
    hold_until_exit(folder)


def give_up(folder: str | Path) -> None:
    """Unlock a folder that this process goes on without; does nothing where it has not locked it."""
    key = os.path.realpath(folder)
    lock_file = _held.pop(key, None)
    _contents.pop(key, None)
    if lock_file is None:
        return
    for file in [one for one in _open if os.path.samestat(os.fstat(one.fileno()), os.fstat(lock_file.fileno()))]:
        _open.remove(file)
        file.close()


def is_lost(folder: str | Path) -> bool:
    """Return whether this process has locked the folder and its lock file has since been removed or replaced."""
    lock_file = _held.get(os.path.realpath(folder))
    if lock_file is None:
        return False
    try:
        return not os.path.samestat(os.fstat(lock_file.fileno()), os.lstat(Path(folder) / LOCK))
    except OSError:
        return True


def name_of_contents(folder: str | Path) -> str | None:
    """Return the name of the folder's contents, which it keeps until it is emptied; None where this process has not
    locked it."""
    return _contents.get(os.path.realpath(folder))


def _contents_name(path: Path, file: IO[str]) -> str:
    """Return the name that an earlier job left; a new one where there is none, or nothing else in the folder.

    A restart of the same launch goes on even if no file but the lock has been written so far.
    """
    if environment.attempt() > 0 or any(not name.startswith(".") for name in os.listdir(path.parent)):
        file.seek(0)
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(load_json(file.read(_LARGEST).encode())["contents"])
    return uuid.uuid4().hex


def _opened(path: Path) -> IO[str]:
    """Open the lock, and nothing that it may lead to: its content is replaced.

    Raises:
        OSError: it is a link, or no regular file, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(error.errno, f"its {path.name} is a link, which is not followed; remove it", str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"its {path.name} is no file; remove it", str(path))
    return open(descriptor, "a+", encoding="utf-8")


def is_held(folder: str | Path) -> bool:
    """Return whether another job holds the lock of `folder`, as far as that can be seen."""
    try:
        with (Path(folder) / LOCK).open("r+", encoding="utf-8") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _TAKEN
    return False


def _refusal(folder: str | Path, file: IO[str]) -> str:
    file.seek(0)
    try:
        holder = load_json(file.read(_LARGEST).encode())
        who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        who = "one that is just starting"
    return (
        f"--save {folder} is in use by another job: {who}; give another folder with --save, or end that job first "
        "(its lock ends with it)"
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
