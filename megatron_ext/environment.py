"""Reads the variables by which a launcher tells a process which rank it is."""

import os
from collections.abc import Mapping

from megatron_ext.errors import ConfigurationError

_LEAST = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_PORT": 0}
_LEAST |= {"TORCHELASTIC_RESTART_COUNT": 0}
_MOST = 1 << 20


def check_launch(environment: Mapping[str, str] = os.environ) -> None:
    """Check the variables that say which rank this is.

    Raises:
        ConfigurationError: one is no integer, out of range, or not set where others are; with every such problem.
    """
    problems = []
    found: dict[str, int] = {}
    for name, least in _LEAST.items():
        text = environment.get(name, "")
        if not text and name not in environment:
            continue
        value = _integer(text)
        if value is None or not least <= value <= _MOST:
            problems.append(
                f"${name} is {text[:100]!r}, not an integer from {least}; start ranks with torchrun, which sets it, "
                f"or unset {name} to run one process"
            )
        else:
            found[name] = value
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in found and size in found and found[rank] >= found[size]:
            problems.append(
                f"${rank} is {found[rank]}, but ${size} is {found[size]}: ranks count from 0; set both as torchrun does"
            )
    if problems:
        raise ConfigurationError(problems)


def rank() -> int:
    """Return this process's rank; 0 without a launcher, or where `check_launch` will say what is wrong."""
    return max(_integer(os.environ.get("RANK", "")) or 0, 0)


def world_size() -> int:
    """Return the number of ranks; 1 without a launcher."""
    return max(_integer(os.environ.get("WORLD_SIZE", "")) or 1, 1)


def local_rank() -> int:
    """Return this process's rank among those of its machine; 0 without a launcher."""
    return max(_integer(os.environ.get("LOCAL_RANK", "")) or 0, 0)


def local_world_size() -> int:
    """Return the number of ranks on this machine; where the launcher does not say, at least this one's count."""
    return max(_integer(os.environ.get("LOCAL_WORLD_SIZE", "")) or 1, local_rank() + 1)


def attempt() -> int:
    """Return how many times torchrun has started the ranks of this launch again; 0 without it."""
    return max(_integer(os.environ.get("TORCHELASTIC_RESTART_COUNT", "")) or 0, 0)


def attempts_left() -> int:
    """Return how many times torchrun will start the ranks of this launch again; 0 without it."""
    return max((_integer(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")) or 0) - attempt(), 0)


def _integer(text: str) -> int | None:
    try:
        return int(text) if len(text) <= 20 else None
    except ValueError:
        return None
