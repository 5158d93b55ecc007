"""The progress of a rank: its phase, its wait, how many operations of each group it has begun, the stacks of its
threads, and when the whole process did not run, as with a job that the scheduler suspends.

The training writes here, and the watch (`watchdog.py`) reads from its thread. A write is one assignment: no lock, no
system call.
"""

import contextlib
import faulthandler
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import get_ident
from time import monotonic
from typing import IO, Any, NamedTuple

from megatron_ext.durable import only_files

LOADER = "data loader"
FORWARD_BACKWARD, UPDATE, EVALUATION = "forward and backward", "the update", "the evaluation"
# Phases in which the host waits for nothing but the device, whose collectives it has begun.
FOLLOWS_DEVICE = (FORWARD_BACKWARD, UPDATE, EVALUATION)


class Wait(NamedTuple):
    """The wait of a thread: in a collective, or for data."""

    operation: str
    """Name of the collective, or `LOADER`."""

    group: Any
    """torch's process group; None for the loader."""

    number: int
    """How many collectives of the group this rank had begun, with this one."""

    began: float
    """time.monotonic() at the begin."""


@dataclass
class Progress:
    """The progress of one rank."""

    phase: str = "the start"
    waits: dict[int, Wait] = field(default_factory=dict)
    """The wait of each thread that waits now, by thread id."""

    failed: Wait | None = None
    """The collective whose failure was the last one."""

    issued: Wait | None = None
    """The last collective that was handed to the device, which goes on by itself."""

    counts: dict[str, int] = field(default_factory=dict)
    """Number of collectives begun, by torch's name of the group."""

    def longest(self) -> Wait | None:
        """Return the wait that began first; None where no thread waits."""
        return min(list(self.waits.values()), key=lambda wait: wait.began, default=None)

    def begin_batch(self, phase: str) -> None:
        """Mark that the work on a global batch begins, which may be long and begins no collective for a while."""
        self.issued = None
        self.phase = phase

    def begin_microbatch(self) -> None:
        """Mark that the host begins a microbatch. It is ahead of the device by few, so that the device goes on."""
        if self.issued is not None:
            self.issued = self.issued._replace(began=monotonic())

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Mark that the thread waits for its data loader."""
        thread = get_ident()
        self.waits[thread] = Wait(LOADER, None, 0, monotonic())
        try:
            yield
        finally:
            self.waits.pop(thread, None)


_A_PAUSE = 3.0  # seconds by which a look is late: no processor was ever so busy


class Pauses:
    """Counts the time in which this process ran: work that was not done while it was suspended is no hang."""

    def __init__(self) -> None:
        self._pauses: deque[tuple[float, float]] = deque(maxlen=100)  # when each ended, and its seconds

    def note(self, now: float, due: float) -> None:
        """Note that work due at `due` was done at `now`; if very late, this process did not run for a while."""
        if now - due > _A_PAUSE:
            self._pauses.append((now, now - due))

    def time_run(self, began: float, now: float) -> float:
        """Return the seconds since `began` in which this process ran."""
        return now - began - sum(seconds for end, seconds in self._pauses if end > began)


_TASKS = Path("/proc/self/task")


def within(seconds: float, write: Callable[[], None]) -> bool:
    """Return whether `write` has finished within so many seconds: the file system itself may hang."""
    written: list[bool] = []

    def try_to_write() -> None:
        with contextlib.suppress(OSError, RuntimeError):
            write()
            written.append(True)

    writer = threading.Thread(target=try_to_write, name="writer", daemon=True)
    writer.start()
    writer.join(seconds)
    return bool(written)


def write_stacks(folder: Path, rank: int, heading: str) -> None:
    """Write `rank-N.txt` in `folder`: the heading, each thread's wait in the kernel, the Python stacks.

    Raises:
        OSError: it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"rank-{rank}.txt", "w", encoding="utf-8", opener=only_files) as file:
        file.write(f"rank {rank}, process {os.getpid()}: {heading}\n\n")
        _write_kernel_waits(file)
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)


def _write_kernel_waits(file: IO[str]) -> None:
    """Write one line for each thread, C++ threads included: its name, its state, the kernel function it is in."""
    for task in sorted(_TASKS.iterdir()) if _TASKS.exists() else ():
        try:
            name = (task / "comm").read_text().strip()
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            function = (task / "wchan").read_text().strip()
        except OSError:  # the thread has ended, or the kernel keeps it to itself
            continue
        where = f" in {function}" if function not in ("", "0") else ""
        file.write(f"thread {task.name} ({name}): {state}{where}\n")
    file.write("\n")
