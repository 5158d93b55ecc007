"""Makes the process groups of a layout, and ends them."""

import copy
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.config.derived.pipeline_split import is_v_shaped
from megatron_ext.config.schema import LayoutConfig
from megatron_ext.device.device_protocol import Device
from megatron_ext.parallel import loopback, rendezvous
from megatron_ext.parallel.own_groups import own_groups_only

# torch's own time limit comes after the watch's limit (resilience/watchdog.py), which says who is to blame.
_SECONDS_FOR_THE_WATCH = 5.0


def start(
    layout: LayoutConfig, device: Device, *, from_host: bool = False, before: Store | None = None
) -> Store | None:
    """Start torch.distributed, with the group of all ranks alone, unless it has been started.

    Args:
        from_host: whether tensors in host memory are communicated, too.
        before: the store of these ranks, where they had groups that have been destroyed.
    Returns:
        The store of these ranks; None where torch.distributed had been started.
    """
    if torch.distributed.is_initialized():
        return None
    timeout = timedelta(minutes=layout.distributed_timeout_minutes)
    loopback.keep_to_this_machine()
    store, rank, world_size = rendezvous.meet(timeout, before) if "RANK" in os.environ else _alone()
    backend = layout.distributed_backend or device.backend
    reports_errors = sys.excepthook
    # No device_id: it makes every group's communicator at once, and unbatched sends and receives, with which
    # interleaved pipelines overlap, then wait for everything else of their group. With nccl-legacy that is how it is;
    # nccl2 binds a device by itself (device/nccl_choice.py).
    torch.distributed.init_process_group(
        backend=device.backend_with_host if from_host else backend,
        timeout=timeout + timedelta(seconds=_SECONDS_FOR_THE_WATCH),
        store=store,
        rank=rank,
        world_size=world_size,
    )
    # torch's hook writes the rank before each line of a traceback, once for each time that it was put in.
    if reports_errors.__module__ == c10d.__name__:
        sys.excepthook = reports_errors
    device.bind_group()
    return store


def initialize(layout: LayoutConfig, device: Device, *, from_host: bool = False) -> ProcessGroupCollection:
    """Start torch.distributed and megatron-core's groups for `layout`; return them as one collection.

    The collection is derived once, here. Everything else in the program takes it as an argument, so that
    megatron-core's global state has one reader.

    Args:
        from_host: whether tensors in host memory are communicated, too.
    """
    start(layout, device, from_host=from_host)
    interleaved = layout.virtual_pipeline_model_parallel_size > 1
    with own_groups_only():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor_model_parallel_size,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size if interleaved else None,
            expert_model_parallel_size=layout.expert_model_parallel_size,
            expert_tensor_parallel_size=_expert_tensor_size(layout),
            context_parallel_size=layout.context_parallel_size,
            num_distributed_optimizer_instances=layout.num_distributed_optimizer_instances,
            order="tp-cp-ep-pp-dp" if layout.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            distributed_timeout_minutes=layout.distributed_timeout_minutes + _SECONDS_FOR_THE_WATCH / 60.0,  # pyright: ignore[reportArgumentType]
            create_gloo_process_groups=False,
            # Where one rank has both ends of the model, no other one has a copy of tied embeddings.
            get_embedding_ranks=(lambda ranks, *_: ranks[:1]) if is_v_shaped(layout) else None,
        )
    return ProcessGroupCollection.use_mpu_process_groups()


def _expert_tensor_size(layout: LayoutConfig) -> int:
    """Return the number of ranks that share an expert's matrices. With stages between the data-parallel ranks,
    megatron-core requires that experts divide over as many ranks as everything else, even where there are none: then
    they are said to divide over these. Where there are experts, rules require it too (`rules/moe_rules.py`)."""
    if layout.use_tp_pp_dp_mapping and layout.pipeline_model_parallel_size > 1:
        others = layout.tensor_model_parallel_size * layout.context_parallel_size
        return others // layout.expert_model_parallel_size
    return layout.expert_tensor_size


@contextmanager
def as_stage(groups: ProcessGroupCollection, stage: int) -> Iterator[ProcessGroupCollection]:
    """Yield the groups with which this rank builds a model chunk of another pipeline stage, inside the context: in a
    V-shaped schedule a rank's second chunk belongs to the stage as far from the other end."""
    if stage == groups.pp.rank():
        yield groups
        return
    others: Any = copy.copy(groups)
    others.pp = SimpleNamespace(rank=lambda: stage, size=groups.pp.size)  # a group that is only counted
    parallel_state.set_pipeline_model_parallel_rank(stage)
    try:
        yield others
    finally:
        parallel_state.set_pipeline_model_parallel_rank(None)


def _alone() -> tuple[Store, int, int]:
    """Return a store, rank 0 and world size 1: without a launcher the program is a group of one, which needs no
    address."""
    return HashStore(), 0, 1


def tensor_group(groups: ProcessGroupCollection, *, expert: bool) -> torch.distributed.ProcessGroup:
    """Return the tensor-parallel group of the routed experts' matrices, or the group of all other weights."""
    return groups.expt_tp if expert else groups.tp


def destroy() -> None:
    """End megatron-core's groups, its other state of the process, and torch.distributed."""
    parallel_state.destroy_model_parallel()
    destroy_moe_metrics_tracker()  # whose tensors have the number of layers of this run
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
