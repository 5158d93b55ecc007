"""Wires the watch over a run's ranks (resilience/watch.py) to torch's process groups and their store."""

import torch
from torch.distributed import ProcessGroup, Store  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.config.schema import LayoutConfig
from megatron_ext.device.protocol import Device
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
    )
    watch.start()
    return watch


def describe(group: ProcessGroup) -> tuple[str, str, tuple[int, ...]]:
    """Return torch's name of a group, equal on all its ranks, its name for people, and its ranks."""
    name, purpose = group.group_name, group.group_desc
    if purpose == "default_pg":
        title = "the group of all ranks"
    elif purpose in ("", "undefined"):
        title = f"the group {name}"
    else:  # megatron-core's, such as TENSOR_MODEL_PARALLEL_GROUP
        title = f"the group {purpose.lower().removesuffix('_group').replace('_', '-')}"
    return name, title, tuple(torch.distributed.get_process_group_ranks(group))
