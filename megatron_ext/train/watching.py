"""Wires the watch over a run's ranks (resilience/watch.py) to torch's process groups and their store."""

import functools

import torch
from torch.distributed import ProcessGroup, Store  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.config.schema import LayoutConfig
from megatron_ext.device.protocol import Device
from megatron_ext.parallel.operations import group_title
from megatron_ext.resilience.board import Board
from megatron_ext.resilience.operation_marks import OperationMarks
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.resilience.watch import Watch


def begin_watch(status: RunStatus, layout: LayoutConfig, device: Device, store: Store | None) -> Watch:
    """Start the watch over this rank, when torch.distributed has been started.

    Args:
        store: the store of these ranks; None, or one rank, is watched alone.
    """
    ranks = torch.distributed.get_world_size()
    board = Board(store.clone(), torch.distributed.get_rank(), ranks) if store is not None and ranks > 1 else None
    watch = Watch(
        status,
        60.0 * layout.distributed_timeout_minutes,
        board,
        describe,
        marks=OperationMarks(status.progress),
        device_runs_ahead=device.kind == "cuda",
        flight_recorder=functools.partial(_flight_recorder, device.backend),
    )
    watch.start()
    return watch


def _flight_recorder(backend: str) -> tuple[str, bytes]:
    """Return what recorded this rank's operations, and its pickle.

    Without stacks: to name their lines may need what the main thread holds.
    """
    from torch._C import _distributed_c10d

    if backend == "nccl":
        return "nccl", _distributed_c10d._dump_nccl_trace(True, False, False)  # pyright: ignore[reportAttributeAccessIssue]  # not in its stubs
    return "gloo", _distributed_c10d._dump_fr_trace(True, False, False)


def describe(group: ProcessGroup) -> tuple[str, str, tuple[int, ...]]:
    """Return torch's name of a group, equal on all its ranks, its name for people, and its ranks."""
    name = group.group_name
    members = tuple(torch.distributed.get_process_group_ranks(group))
    return name, group_title(name, group.group_desc), members
