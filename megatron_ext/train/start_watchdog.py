"""Wires the watch over a run's ranks (resilience/watchdog.py) to torch's process groups and their store.

Marks in a rank's `Progress` which collective it is in, whoever called it.

A mark costs about a microsecond: a tuple and an entry of a dictionary. On a GPU a collective returns before it is done;
then the device may hang in the last one that was handed over.
"""

import functools
import weakref
from collections.abc import Callable
from threading import get_ident
from time import monotonic
from typing import Any

import torch
from torch.distributed import ProcessGroup, Store, Work  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.config.schema import LayoutConfig
from megatron_ext.device.device_protocol import Device
from megatron_ext.parallel.operations import COLLECTIVES, END_OF_BATCH, MESSAGES, WrappedMethods, group_title
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.resilience.progress import Progress, Wait
from megatron_ext.resilience.rank_reports import Board
from megatron_ext.resilience.watchdog import Watch


class OperationMarks:
    """Keeps `progress` informed of this process's collectives between `start` and `stop`."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._methods = WrappedMethods()
        self._works: weakref.WeakKeyDictionary[Work, Wait] = weakref.WeakKeyDictionary()

    def start(self) -> None:
        """Wrap the methods of torch's process groups."""
        for name in (*MESSAGES, *COLLECTIVES, END_OF_BATCH):
            self._methods.wrap(ProcessGroup, name, functools.partial(self._marked, name, int(name in COLLECTIVES)))
        self._methods.wrap(Work, "wait", self._marked_wait)

    def stop(self) -> None:
        """Put the methods back."""
        self._methods.put_back()

    def _marked(self, name: str, counts_as: int, original: Callable[..., Any]) -> Callable[..., Any]:
        progress, waits, counts, works = self._progress, self._progress.waits, self._progress.counts, self._works

        @functools.wraps(original)
        def operation(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            thread, key = get_ident(), group.group_name
            counts[key] = number = counts.get(key, 0) + counts_as
            wait = waits[thread] = Wait(name, group, number, monotonic())
            try:
                work = original(group, *args, **kwargs)
            except BaseException:
                progress.failed = waits.pop(thread, None)
                raise
            waits.pop(thread, None)
            progress.issued = wait
            if work is not None:
                works[work] = wait
            return work

        return operation

    def _marked_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        progress, waits, works = self._progress, self._progress.waits, self._works

        @functools.wraps(original)
        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            begun = works.get(work)
            if begun is None:  # begun in C++
                return original(work, *args, **kwargs)
            thread = get_ident()
            waits[thread] = Wait(begun.operation, begun.group, begun.number, monotonic())
            try:
                result = original(work, *args, **kwargs)
            except BaseException:
                progress.failed = waits.pop(thread, None)
                raise
            waits.pop(thread, None)
            return result

        return wait


def begin_watch(status: RunStatus, layout: LayoutConfig, device: Device, store: Store | None) -> Watch:
    """Start the watch over this rank, when torch.distributed has been started.

    Args:
        store: the store of these ranks; None, or one rank, is watched alone.
    """
    ranks = torch.distributed.get_world_size()
    board = Board(store.clone(), torch.distributed.get_rank(), ranks) if store is not None and ranks > 1 else None
    recorder = None
    if device.backend == "nccl":
        recorder = functools.partial(_flight_record, _recording_backend(device))
    watch = Watch(
        status,
        60.0 * layout.distributed_timeout_minutes,
        board,
        describe,
        marks=OperationMarks(status.progress),
        device_runs_ahead=device.kind == "cuda",
        flight_recorder=recorder,
    )
    watch.start()
    return watch


def _recording_backend(device: Device) -> str:
    """Return the name under which torch's flight recorder keeps this rank's operations: "nccl" or "nccl2"."""
    everyone: Any = torch.distributed.group.WORLD
    return everyone._get_backend(device.torch_device).name()


def _flight_record(backend: str) -> bytes:
    """Return the pickle of a backend's flight record of this rank's operations.

    Stacks are left out: to name their lines may need what the main thread holds.
    """
    from torch._C import _distributed_c10d

    if backend == "nccl":
        return _distributed_c10d._dump_nccl_trace(True, False, False)  # pyright: ignore[reportAttributeAccessIssue]  # not in its stubs
    return _distributed_c10d._dump_fr_trace(True, False, False, backend=backend)


def describe(group: ProcessGroup) -> tuple[str, str, tuple[int, ...]]:
    """Return torch's name of a group, equal on all its ranks, its name for people, and its ranks."""
    name = group.group_name
    members = tuple(torch.distributed.get_process_group_ranks(group))
    return name, group_title(name, group.group_desc), members
