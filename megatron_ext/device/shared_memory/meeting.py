"""The ranks of a new group find each other's processes, and map one memory, if they are on one machine."""

import logging
import os
from dataclasses import dataclass
from typing import Any

from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext import environment
from megatron_ext.device.shared_memory import futex, peers
from megatron_ext.device.shared_memory.segment import MOST_RANKS, Layout, Segment

OFF = "MEGATRON_EXT_NO_SHARED_MEMORY"
"""Environment variable: 1 on any rank leaves a group to gloo."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Members:
    """The processes of a group."""

    rank: int
    """This process's, within the group."""

    processes: tuple[int, ...]
    """Process numbers, by rank."""

    names: tuple[int, ...]
    """Ranks in the world, by rank."""


def meet(store: Any, rank: int, ranks: int, names: list[int]) -> tuple[Segment, Members] | None:
    """Return the memory that this group's ranks share; None where it stays gloo's. Collective.

    All ranks come to the same answer: they are on several machines, or are too many, or one of them could not map the
    memory, which rank 0 then says in a line, unless another group of the launch has said the same.

    Args:
        store: the group's own.
        names: the group's ranks in the world; empty for the group of all ranks.
    """
    if not 1 < ranks <= MOST_RANKS:
        return None
    file = _create(ranks) if rank == 0 and futex.is_available() else None
    try:
        machine = _machine() or f"none of rank {rank}"
        said = _exchange(store, "shared-memory", rank, ranks, f"{machine}|{os.getpid()}|{-1 if file is None else file}")
        machines, processes, files = zip(*(text.split("|") for text in said), strict=True)
        if len(set(machines)) > 1:
            return None
        segment, problem = _map(int(processes[0]), int(files[0]), ranks)
        problems = [text for text in _exchange(store, "shared-memory-mapped", rank, ranks, problem) if text != "-"]
        if problems or segment is None:
            if rank == 0 and _is_news(store, problems[0]):
                _logger.warning("CPU ranks talk over gloo alone, not through shared memory: %s", problems[0])
            return None
    finally:
        if file is not None:
            os.close(file)
    members = Members(rank, tuple(map(int, processes)), tuple(names) or tuple(range(ranks)))
    for process in members.processes:
        peers.watch(process)
    return segment, members


def _machine() -> str:
    """Return this machine's name; nothing where shared memory is not to be had, or not wanted."""
    if os.environ.get(OFF) == "1" or not futex.is_available():
        return ""
    try:
        return peers.machine()
    except OSError:
        return ""


def _create(ranks: int) -> int | None:
    """Return a file in memory, which no folder holds."""
    try:
        file = os.memfd_create("megatron_ext collectives")
        os.ftruncate(file, Layout(ranks).size)
    except OSError:
        return None
    return file


def _map(process: int, file: int, ranks: int) -> tuple[Segment | None, str]:
    """Return the memory and "-"; or None, and why rank 0's file cannot be mapped."""
    try:
        if file < 0:
            raise OSError("rank 0 could not create a file in memory")
        opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return Segment(opened, ranks), "-"
        finally:
            os.close(opened)
    except (OSError, ValueError) as error:  # without the file's name, which is another one for every group
        return None, getattr(error, "strerror", None) or str(error) or type(error).__name__


def _is_news(store: Any, problem: str) -> bool:
    """Return whether no group of this attempt has said it, as far as the store that all groups share knows."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.add(f"shared-memory-said/{environment.attempt()}/{problem}", 1) == 1


def _exchange(store: Any, key: str, rank: int, ranks: int, text: str) -> list[str]:
    """Return what all ranks say, in order."""
    store.set(f"{key}/{rank}", text)
    return [answer.decode() for answer in store.multi_get([f"{key}/{other}" for other in range(ranks)])]
