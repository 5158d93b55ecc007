"""Makes the process groups of a layout."""

import os
from datetime import timedelta

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from torch.distributed import HashStore, Store  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.config.schema import LayoutConfig
from megatron_ext.device.protocol import Device
from megatron_ext.parallel import rendezvous, sockets
from megatron_ext.parallel.own_groups import own_groups_only

# torch's own time limit comes after that of the watch (resilience/watch.py), which says who is to blame.
_SECONDS_FOR_THE_WATCH = 5.0


def start(layout: LayoutConfig, device: Device, *, from_host: bool = False) -> Store | None:
    """Start torch.distributed, with the group of all ranks alone, unless it has been started.

    Args:
        from_host: whether tensors in host memory are communicated, too.
    Returns:
        The store of these ranks; None where torch.distributed had been started.
    """
    if torch.distributed.is_initialized():
        return None
    timeout = timedelta(minutes=layout.distributed_timeout_minutes)
    sockets.keep_to_this_machine()
    store, rank, world_size = rendezvous.meet(timeout) if "RANK" in os.environ else _alone()
    backend = layout.distributed_backend or device.backend
    # No device_id: it makes every group's communicator at once, and unbatched sends and receives, with which
    # interleaved pipelines overlap, then wait for everything else of their group.
    torch.distributed.init_process_group(
        backend=device.backend_with_host if from_host else backend,
        timeout=timeout + timedelta(seconds=_SECONDS_FOR_THE_WATCH),
        store=store,
        rank=rank,
        world_size=world_size,
    )
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
            expert_tensor_parallel_size=layout.expert_tensor_size,
            context_parallel_size=layout.context_parallel_size,
            num_distributed_optimizer_instances=layout.num_distributed_optimizer_instances,
            order="tp-cp-ep-pp-dp" if layout.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            distributed_timeout_minutes=layout.distributed_timeout_minutes + _SECONDS_FOR_THE_WATCH / 60.0,  # pyright: ignore[reportArgumentType]
            create_gloo_process_groups=False,
        )
    return ProcessGroupCollection.use_mpu_process_groups()


def _alone() -> tuple[Store, int, int]:
    """Return a store, rank 0 and world size 1: without a launcher the program is a group of one, which needs no
    address."""
    return HashStore(), 0, 1


def tensor_group(groups: ProcessGroupCollection, *, expert: bool) -> torch.distributed.ProcessGroup:
    """Return the ranks that share the matrices of the routed experts, or those of everything else."""
    return groups.expt_tp if expert else groups.tp


def destroy() -> None:
    """End megatron-core's groups, what else it keeps for the process of a run, and torch.distributed."""
    parallel_state.destroy_model_parallel()
    destroy_moe_metrics_tracker()  # whose tensors have the number of layers of this run
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
