"""Says which process a rank is, and whether it still lives."""

import functools
import os
import select
from pathlib import Path


def machine() -> str:
    """Return what two processes have in common if they can see each other: the running kernel, and the process
    numbers' namespace (containers of one machine have their own)."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


@functools.cache
def _handle(process: int) -> int | None:
    """Return a file descriptor that becomes readable when the process ends; None where it has ended."""
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        return None


def watch(process: int) -> None:
    """Open the handle of a process that is known to live, so that another one of its number is not taken for it."""
    _handle(process)


def has_ended(process: int) -> bool:
    """Return whether a process has ended, even where its parent has not fetched its status."""
    handle = _handle(process)
    if handle is None:
        return True
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(0))
