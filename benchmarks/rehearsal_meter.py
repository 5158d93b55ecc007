"""What a phase of a rank's start costs: time, memory, process groups, files."""

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import psutil
import torch
import torch.distributed.distributed_c10d as c10d

from megatron_ext.parallel.operations import WrappedMethods

_CODE = (".py", ".pyc", ".so", ".pyi", ".json", ".typed")  # of packages that are imported late


@dataclass(frozen=True)
class Phase:
    """The cost of one phase on one rank."""

    name: str
    seconds: float
    """CPU seconds of the process."""
    bytes: int
    """Resident memory that it has more at the end."""
    groups: int
    """Process groups made."""
    new_group_calls: int
    """Calls of torch's `new_group`, also for groups that this rank is not in."""
    files: int
    """Files opened, those of Python's modules aside."""
    bytes_read: int
    """Bytes that the process read from files, but not through a map of a file."""


class _OpenedFiles:
    """Counts the files that Python opens, once `watch` was called; an audit hook cannot be taken back."""

    count = 0
    _watches = False

    @classmethod
    def watch(cls) -> None:
        """Begin to count, once for the process."""
        if not cls._watches:
            sys.addaudithook(cls._hook)
            cls._watches = True

    @classmethod
    def _hook(cls, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and not _is_code(arguments[0]):
            cls.count += 1


def _is_code(path: str) -> bool:
    return path.endswith(_CODE) or path.startswith(("/proc", "/sys", "/dev"))


class Meter:
    """Measures the phases of a rank, one after another.

    Args:
        measures: whether it does; it collects garbage before each phase, which takes longer than most phases.
    """

    def __init__(self, *, measures: bool = True) -> None:
        self.phases: list[Phase] = []
        self.measures = measures
        self._calls = 0
        _OpenedFiles.watch()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Return a context that is one phase."""
        if not self.measures:
            yield
            return
        wrapped = WrappedMethods()
        wrapped.wrap(cast(Any, torch.distributed), "new_group", self._counted)
        gc.collect()
        before = self._state()
        try:
            yield
        finally:
            after = self._state()
            wrapped.put_back()
        seconds, resident, *counts = (late - early for late, early in zip(after, before, strict=True))
        self.phases.append(Phase(name, float(seconds), int(resident), *map(int, counts)))

    def _state(self) -> tuple[float, ...]:
        """Return what has been used so far, in the order of Phase's fields."""
        process = psutil.Process()
        read = process.io_counters().read_chars if hasattr(process, "io_counters") else 0  # not on macOS
        resident = process.memory_info().rss
        return time.process_time(), resident, len(c10d._world.pg_map), self._calls, _OpenedFiles.count, read

    def _counted(self, new_group: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            self._calls += 1
            return new_group(*arguments, **options)

        return counted
