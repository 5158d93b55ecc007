"""How much memory this machine, or the container that the process is in, lets its processes use. No torch here."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")
_LIMIT, _USED = ("memory.max", "memory/memory.limit_in_bytes"), ("memory.current", "memory/memory.usage_in_bytes")


def host_memory(cgroup: Path = _CGROUP) -> tuple[int, int]:
    """Return the bytes of memory in all, and those that are free now.

    The limit of a control group, as containers and schedulers set it, counts where it is lower: what exceeds it is
    killed without a word.
    """
    memory = psutil.virtual_memory()
    limit, used = _number(cgroup, _LIMIT), _number(cgroup, _USED)
    if limit is None or limit >= memory.total:
        return memory.total, memory.available
    return limit, max(0, min(memory.available, limit - (used or 0)))


def host_swap() -> int:
    """Return the bytes that can be swapped out: with them more is kept, if slowly."""
    return psutil.swap_memory().total


def _number(folder: Path, names: tuple[str, ...]) -> int | None:
    """Return the first that can be read; None where there is none, or no limit ("max")."""
    for name in names:
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):
            continue
    return None
