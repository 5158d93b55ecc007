"""Makes the process groups of a layout.

Lets a rank make only those process groups that it is in, out of all that megatron-core makes.

megatron-core calls `new_group` on every rank for every group of the world: 5,249 times with 1,024 ranks, of which a
rank is in 20. For the others torch does nothing but count: a group's name is the number of groups that were asked for
before it. So the other calls can be left out, as long as the count goes on; names, ranks and order of the groups that
are made stay as they were.

(torch's own `use_local_synchronization` would not do. It names a group after its ranks and the number of groups that
this rank is in, and a stage in the middle of a pipeline is in fewer than its ends: they would not agree on the names of
the groups that they share.)
"""

import copy
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed.distributed_c10d as c10d
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.config.derived.pipeline_split import is_v_shaped
from megatron_ext.config.schema import LayoutConfig
from megatron_ext.device.device_protocol import Device
from megatron_ext.parallel import rendezvous


@contextmanager
def own_groups_only() -> Iterator[None]:
    """Return a context in which megatron-core makes the groups of this rank alone, and lists ranks by numpy."""
    create, generate = parallel_state.create_group, parallel_state.generate_masked_orthogonal_rank_groups
    parallel_state.generate_masked_orthogonal_rank_groups = rank_groups
    if _others_may_be_left_out():
        parallel_state.create_group = _if_member(create)
    try:
        yield
    finally:
        parallel_state.create_group, parallel_state.generate_masked_orthogonal_rank_groups = create, generate


def rank_groups(world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]) -> list[list[int]]:
    """Return all groups of ranks that differ in the masked dimensions alone, as megatron-core's function does, which
    takes seconds for ten thousand ranks.

    Args:
        world_size: product of the sizes, or a part of it that whole groups fill.
        parallel_size: ranks in each dimension, the fastest varying first.
        mask: whether a group extends over the dimension.
    """
    last = len(parallel_size) - 1
    ranks_by_place = np.arange(int(np.prod(parallel_size))).reshape(tuple(reversed(parallel_size)))
    # The slowest varying dimension is numpy's first; who varies faster in a group, or among groups, stays so.
    across = [last - dimension for dimension, masked in enumerate(mask) if not masked][::-1]
    within = [last - dimension for dimension, masked in enumerate(mask) if masked][::-1]
    size = int(np.prod([parallel_size[dimension] for dimension, masked in enumerate(mask) if masked]))
    groups = ranks_by_place.transpose(*across, *within).reshape(-1, size)
    return groups[: world_size // size].tolist()


def _others_may_be_left_out() -> bool:
    """Return whether torch does no more than count for a group that this rank is not in.

    It does more where communicators are split from the group of all ranks, which is bound to a device then, and where
    all ranks wait for each other after each group.
    """
    everyone: Any = c10d._get_default_group()
    is_plain = type(everyone) is torch.distributed.ProcessGroup and everyone.bound_device_id is None
    waits = os.environ.get("TORCH_DIST_INIT_BARRIER", "0") == "1"
    return is_plain and not waits and torch.distributed.get_backend() != "mpi"


def _if_member(create: Callable[..., Any]) -> Callable[..., Any]:
    rank = torch.distributed.get_rank()

    def create_group(ranks: Sequence[int], **options: Any) -> Any:
        if rank in ranks:
            return create(ranks, **options)
        c10d._process_group_name(ranks, use_hashed_name=False)  # counts it
        return c10d.GroupMember.NON_GROUP_MEMBER

    return create_group


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
    rendezvous.keep_to_this_machine()
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
