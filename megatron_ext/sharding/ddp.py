"""megatron-core's DDP: weights whole on every data-parallel rank, and with the distributed optimizer (ZeRO-1) its state
in shards, each a flat range of all weights one after another."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch.distributed import ProcessGroup

from megatron_ext.device.protocol import Device
from megatron_ext.device.weight_gradients import products_write
from megatron_ext.sharding.engine import (
    build_optimizer,
    ddp_config,
    for_chunks,
    initialized,
    optimizer_settings,
    updating,
)
from megatron_ext.sharding.flat_shards import FlatPart
from megatron_ext.sharding.gradient_buffers import WritingDataParallel
from megatron_ext.sharding.parts import OptimizerPart
from megatron_ext.sharding.protocol import Reduced, Sharding, Watcher


class DataParallel(Sharding):
    """Replicas of the weights, with or without the distributed optimizer."""

    def shard(
        self,
        chunks: Sequence[torch.nn.Module],
        core: TransformerConfig,
        groups: ProcessGroupCollection,
        device: Device,
    ) -> list[WritingDataParallel]:
        """Wrap every model chunk in megatron-core's DDP, and wire its hooks into the pipeline schedule.

        The schedule must know when it may skip the reduction (all microbatches but the last) and, with overlap,
        when to start one; without these hooks accumulation silently drifts.
        """
        settings = ddp_config(self.config)
        writes = not self.config.training.gradient_accumulation_fusion or products_write()
        wrapped = [
            WritingDataParallel(
                writes=writes,
                config=core,
                ddp_config=settings,
                module=chunk,
                pg_collection=groups,
                # Later chunks of an interleaved stage reduce while others still compute: one bucket is enough.
                disable_bucketing=index > 0,
            )
            for index, chunk in enumerate(initialized(chunks, self.config, core, groups, device))
        ]
        if settings.overlap_grad_reduce:
            core.no_sync_func = for_chunks([chunk.no_sync for chunk in wrapped])
            core.grad_sync_func = for_chunks([chunk.start_grad_sync for chunk in wrapped])
        if settings.overlap_param_gather:
            core.param_sync_func = for_chunks([chunk.start_param_sync for chunk in wrapped])
            for chunk in wrapped:
                _unhook_modules_without_weights(chunk)
                model: Any = chunk.module
                model.before_output = partial(_finish_gather, chunk)
        return wrapped

    def optimizer(
        self, chunks: Sequence[_BaseDataParallel], groups: ProcessGroupCollection, device: Device
    ) -> ChainedOptimizer:
        settings = optimizer_settings(self.config, distributed=self.config.layout.use_distributed_optimizer)
        return build_optimizer(chunks, settings, self.config.optimizer, groups)

    def parts(self, optimizer: ChainedOptimizer) -> list[OptimizerPart]:
        kind = FlatPart if self.config.layout.use_distributed_optimizer else OptimizerPart
        return updating(optimizer, kind)

    @contextmanager
    def gathered(self, chunks: Sequence[Any]) -> Iterator[None]:
        """With --overlap-param-gather the optimizer's result is gathered during the next forward pass; whoever
        reads the weights in between (evaluation, saving) would see old ones."""
        if not self.config.layout.overlap_param_gather:
            yield
            return
        for chunk in chunks:
            chunk.disable_forward_pre_hook()
        try:
            yield
        finally:
            for chunk in chunks:
                chunk.enable_forward_pre_hook()
                _unhook_modules_without_weights(chunk)

    @contextmanager
    def gathered_before_update(self, chunks: Sequence[Any]) -> Iterator[None]:
        """Switch off the gathers of the hooks: one that is begun here would count as that of the next step, which would
        compute with weights of before the update."""
        overlaps = self.config.layout.overlap_param_gather
        for chunk in chunks if overlaps else ():
            chunk.disable_forward_pre_hook(param_sync=False)
        try:
            yield
        finally:
            for chunk in chunks if overlaps else ():
                chunk.enable_forward_pre_hook()
                _unhook_modules_without_weights(chunk)

    def reduced_gradients(self, chunk: Any) -> Reduced:
        """Fetch the other ranks' parts: with the distributed optimizer each rank's buffer is reduced only in its own
        shard."""
        groups = [(bucket_group, chunk.intra_dp_cp_group) for bucket_group in chunk.bucket_groups]
        groups += [(bucket_group, chunk.intra_expt_dp_group) for bucket_group in chunk.expert_parallel_bucket_groups]
        for bucket_group, group in groups:
            for bucket in bucket_group.buckets:
                reduced = bucket.grad_data
                if chunk.ddp_config.use_distributed_optimizer:
                    reduced = torch.empty_like(bucket.grad_data)
                    own = shard_buffer(bucket.grad_data, group.size())[group.rank()]
                    torch.distributed.all_gather_into_tensor(reduced, own.clone(), group=group)
                for parameter in bucket.params_list:
                    start, end = bucket.param_to_index[parameter]
                    yield parameter, reduced[start:end].view(parameter.shape)

    def watch(self, chunk: Any, watcher: Watcher) -> None:
        watcher.register(chunk)
        chunk.watchers.append(watcher)

    def holders_of_one_copy(
        self, optimizer: ChainedOptimizer, groups: ProcessGroupCollection
    ) -> tuple[ProcessGroup, ProcessGroup]:
        """Return whole experts are divided over other ranks than the rest."""
        return groups.mp, groups.tp_ep_pp

    def held_weights(self, chunk: _BaseDataParallel) -> Iterator[torch.Tensor | None]:
        yield from (parameter.detach() for parameter in chunk.parameters())
        yield from (buffer.param_data for buffer in _buffers(chunk))

    def held_gradients(self, chunk: _BaseDataParallel) -> Iterator[torch.Tensor | None]:
        yield from (parameter.grad for parameter in chunk.parameters())
        yield from (buffer.grad_data for buffer in _buffers(chunk))


def _buffers(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _unhook_modules_without_weights(chunk: Any) -> None:
    """Take off the hooks that would wait for no weight: megatron-core hooks every module, and half of them have none.

    The handles stay, for megatron-core removes them all.
    """
    for module, handle in chunk.remove_forward_pre_hook_handles.items():
        if next(module.parameters(recurse=False), None) is None:
            handle.remove()


def _finish_gather(chunk: DistributedDataParallel, module: torch.nn.Module) -> None:
    """Wait until the module's own weights are gathered, as the hook before its forward pass would do."""
    if module not in chunk.remove_forward_pre_hook_handles:  # all weights are gathered and the hooks are off
        return
    for weight in module.parameters(recurse=False):
        chunk.param_to_bucket_group[weight].finish_param_sync()
