"""megatron-core's DDP: weights whole on every data-parallel rank, and with the distributed optimizer (ZeRO-1) its state
in shards, each a flat range of all weights one after another.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch.distributed import ProcessGroup

from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.device.device_protocol import Device
from megatron_ext.device.weight_gradients import products_write
from megatron_ext.model.loss import OutputLayer
from megatron_ext.model.names import catalogued
from megatron_ext.optim.settings import optimizer_config
from megatron_ext.sharding.engine import (
    build_optimizer,
    ddp_config,
    for_chunks,
    initialized,
    updating,
)
from megatron_ext.sharding.flat_shards import FlatPart
from megatron_ext.sharding.narrow import narrow_buckets
from megatron_ext.sharding.parts import OptimizerPart
from megatron_ext.sharding.scheme import Reduced, Sharding, Watcher
from megatron_ext.sharding.written_gradients import WritingDataParallel


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
                full_param_layout=self._whole_matrices(chunk, settings, groups),
            )
            for index, chunk in enumerate(initialized(chunks, self.config, core, groups, device))
        ]
        if self.config.layout.sharding.optimizer:
            for chunk in wrapped:
                chunk.narrow = narrow_buckets((*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups))
        if settings.overlap_grad_reduce:
            core.no_sync_func = for_chunks([chunk.no_sync for chunk in wrapped])
            core.grad_sync_func = for_chunks([chunk.start_grad_sync for chunk in wrapped])
        if settings.overlap_param_gather:
            core.param_sync_func = for_chunks([chunk.start_param_sync for chunk in wrapped])
            for chunk in wrapped:
                _hook_modules_that_read(chunk)
        return wrapped

    def _whole_matrices(
        self, chunk: torch.nn.Module, settings: DistributedDataParallelConfig, groups: ProcessGroupCollection
    ) -> FullParamLayout | None:
        """Return where the weights lie in the buffers such that no rank's range begins or ends within a matrix, where
        the optimizer needs that: megatron-core's layout for its layer-wise optimizer, under its distributed one."""
        if not (self.config.layout.sharding.optimizer and traits_of(self.config.optimizer).needs_whole_matrices):
            return None
        known = catalogued([chunk], self.config)
        for weight in chunk.parameters():
            vars(weight)["is_managed_by_layer_wise_optimizer"] = known[id(weight)].update == "matrix"
        return LayerWiseDistributedOptimizer.compute_full_param_layout(
            list(chunk.parameters()),
            settings.bucket_size if settings.overlap_grad_reduce else None,
            groups.intra_dp_cp.size(),
            settings,
            expert_data_parallel_world_size=groups.intra_expt_dp.size(),
        )

    def optimizer(
        self, chunks: Sequence[_BaseDataParallel], groups: ProcessGroupCollection, device: Device
    ) -> ChainedOptimizer:
        for weight in (weight for chunk in chunks for weight in chunk.parameters()):
            vars(weight).pop("is_managed_by_layer_wise_optimizer", None)  # or the distributed one would leave it out
        settings = optimizer_config(
            self.config,
            distributed=self.config.layout.sharding.optimizer,
            overlaps=self.config.layout.overlap_param_gather,
        )
        built = build_optimizer(chunks, settings, self.config, groups)
        for part in self.parts(built):
            if isinstance(part, FlatPart):
                part.copy_at_once()
            for weight, main in part.main_parameters():
                if "matrix" in vars(weight):
                    vars(main)["matrix"] = vars(weight)["matrix"]
        return built

    def parts(self, optimizer: ChainedOptimizer) -> list[OptimizerPart]:
        kind = FlatPart if self.config.layout.sharding.optimizer else OptimizerPart
        return updating(optimizer, kind)

    @contextmanager
    def gathered(self, chunks: Sequence[Any]) -> Iterator[None]:
        """With --overlap-param-gather the optimizer's result is gathered during the next forward pass; whoever
        reads the weights in between (evaluation, saving) would see old ones, and no others' weights where they are
        gathered in eight bits."""
        if not self.config.layout.overlap_param_gather:
            for group in (group for chunk in chunks for group in chunk.narrow if group.is_narrow):
                group.start(force_sync=True)
            yield
            return
        for chunk in chunks:
            chunk.disable_forward_pre_hook()
        try:
            yield
        finally:
            for chunk in chunks:
                chunk.enable_forward_pre_hook()
                _hook_modules_that_read(chunk)

    @contextmanager
    def averaged(self, optimizer: ChainedOptimizer, chunks: Sequence[Any]) -> Iterator[None]:
        """Gather the weights afterwards: the next forward pass gathers after an update alone, and would compute with
        the averages of other ranks' shards."""
        with super().averaged(optimizer, chunks):
            yield
        with self.gathered(chunks):
            pass

    @contextmanager
    def gathered_before_update(self, chunks: Sequence[Any]) -> Iterator[None]:
        """Switch off the gathers that hooks begin: one begun here would count as the next step's gather, and the next
        step would compute with weights from before the update."""
        overlaps = self.config.layout.overlap_param_gather
        for chunk in chunks if overlaps else ():
            chunk.disable_forward_pre_hook(param_sync=False)
        try:
            yield
        finally:
            for chunk in chunks if overlaps else ():
                chunk.enable_forward_pre_hook()
                _hook_modules_that_read(chunk)

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
        """Return the ranks that hold one copy together: whole experts are divided over other ranks than the rest."""
        return groups.mp, groups.tp_ep_pp

    def held_weights(self, chunk: _BaseDataParallel) -> Iterator[torch.Tensor | None]:
        yield from (parameter.detach() for parameter in chunk.parameters())
        yield from (buffer.param_data for buffer in _buffers(chunk))

    def held_gradients(self, chunk: _BaseDataParallel) -> Iterator[torch.Tensor | None]:
        yield from (parameter.grad for parameter in chunk.parameters())
        yield from (buffer.grad_data for buffer in _buffers(chunk))


def _buffers(chunk: Any) -> list[Any]:
    return [*chunk.buffers, *chunk.expert_parallel_buffers]


def _hook_modules_that_read(chunk: Any) -> None:
    """Have every module wait for the weights that it reads. megatron-core has each wait for the weights that it holds
    itself: half of them hold nothing, and the output layer of tied embeddings is given their weight.

    The handles stay, for megatron-core removes them all.
    """
    handles = chunk.remove_forward_pre_hook_handles
    for module, handle in handles.items():
        if isinstance(module, OutputLayer) and module.weight is None:
            handle.remove()
            hook: Any = partial(_wait_for_given, chunk.param_to_bucket_group)
            handles[module] = module.register_forward_pre_hook(hook, with_kwargs=True)
        elif next(module.parameters(recurse=False), None) is None:
            handle.remove()


def _wait_for_given(groups: Mapping[Any, Any], module: Any, _inputs: object, given: Mapping[str, Any]) -> None:
    for weight in (*module.parameters(recurse=False), given["weight"]):
        groups[weight].finish_param_sync()
