"""A machine that goes down: what a folder holds then, before every call that changes names or waits for the disk.

    disk = watched_disk(folder)
    publish(folder, 2)
    for call, left in disk.crashes(tmp_path / "left"):
        ...                                   # what `left` holds, had the machine gone down before `call`

A disk may keep what nobody waited for, or lose it. Each moment gives the two ends: all names that there were, and none
that were not synced with their folder. Bytes are kept only where the file was synced after they were written.
"""

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_CALLS = ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir")


@dataclass(frozen=True)
class _Moment:
    call: str
    names: dict[int, dict[str, int]]
    """Names by the inode of their folder, as all processes see them."""
    synced_names: dict[int, dict[str, int]]
    synced: dict[int, bytes]
    folders: set[int]


class Disk:
    """Watches a folder from now on. What is there is on the disk."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.calls, self.end = folder, list[str](), monkeypatch.undo
        self._root = folder.stat().st_ino
        self._moments: list[_Moment] = []
        self._kept_open: dict[int, int] = {}  # an inode's number is not given to another file
        self._folders: set[int] = set()
        self._synced: dict[int, bytes] = {}
        self._synced_names = self._names()
        for inode, descriptor in self._kept_open.items():
            if inode not in self._folders:
                self._synced[inode] = _content(descriptor)
        for name in _CALLS:
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def crashes(self, into: Path) -> Iterator[tuple[str, Path]]:
        """Yield each call, and then the end, with what the folder held, had the machine gone down before it."""
        self._remember("the end")
        for number, moment in enumerate(self._moments):
            for kind, names in (("kept", moment.names), ("lost", moment.synced_names)):
                left = into / f"{number}_{kind}"
                _make(left, self._root, names, moment)
                yield f"{moment.call} ({kind})", left

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            paths = arguments[: 2 if name in ("replace", "rename") else 1]
            said = " ".join([name, *map(self._name_of, paths)])
            self._remember(said)
            self.calls.append(said)
            if name == "fsync":
                self._sync(arguments[0])
            return real(*arguments, **options)

        return call

    def _name_of(self, argument: Any) -> str:
        path = os.readlink(f"/proc/self/fd/{argument}") if isinstance(argument, int) else os.fspath(argument)
        return os.path.relpath(path, self.folder) if os.path.isabs(path) else str(path)

    def _remember(self, call: str) -> None:
        names = self._names()
        self._moments.append(_Moment(call, names, dict(self._synced_names), dict(self._synced), set(self._folders)))

    def _sync(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        names = self._names()
        if inode in self._folders:
            self._synced_names[inode] = names[inode]
        else:
            self._synced[inode] = _content(self._kept_open[inode])

    def _names(self) -> dict[int, dict[str, int]]:
        """Look at every folder, and keep all files open."""
        found: dict[int, dict[str, int]] = {}
        for path, _, _ in os.walk(self.folder):
            entries = {entry.name: entry.inode() for entry in os.scandir(path)}
            inode = os.stat(path).st_ino
            found[inode] = entries
            self._folders.add(inode)
            for name, other in entries.items():
                if other not in self._kept_open:
                    self._kept_open[other] = os.open(os.path.join(path, name), os.O_RDONLY)
        return found


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""


def _make(path: Path, inode: int, names: dict[int, dict[str, int]], moment: _Moment) -> None:
    os.makedirs(path)
    for name, other in names.get(inode, {}).items():
        if other in moment.folders:
            _make(path / name, other, names, moment)
        else:
            (path / name).write_bytes(moment.synced.get(other, b""))
