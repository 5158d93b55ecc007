"""Writes down where all threads of this process are, in Python and, as far as the kernel says it, below."""

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO

from megatron_ext.durable import only_files

_TASKS = Path("/proc/self/task")


def within(seconds: float, write: Callable[[], None]) -> bool:
    """Return whether `write` has written what it writes in so many seconds: it may be the file system that hangs."""
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
    """Write `rank-N.txt` in `folder`: the heading, what each thread waits for in the kernel, the Python stacks.

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
    """Write one line for each thread, those of C++ included: its name, its state, the kernel function it is in."""
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
