"""`--use-megatron-fsdp` is megatron-core's own FSDP, by strategy: no_shard (DDP), optim (ZeRO-1), optim_grads (ZeRO-2),
optim_grads_params (ZeRO-3).

Weights are 16-bit (or fp32) in its buffers, gradients fp32, masters fp32. ZeRO-2 and ZeRO-3 reduce gradients after
every microbatch. Gradients must be fp32: of others it makes a copy before sequence-parallel norms are summed, and
throws that sum away when it scales them.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.device.device_protocol import Device
from megatron_ext.optim.settings import optimizer_config
from megatron_ext.parallel.rows import RowShard, mark
from megatron_ext.sharding.engine import (
    build_optimizer,
    ddp_config,
    for_chunks,
    initialized,
)
from megatron_ext.sharding.row_shards import RowSharding, RowShards
from megatron_ext.sharding.scheme import Watcher


class MegatronFSDP(RowSharding):
    """megatron-core's FSDP. Its shards stand where the weights are, until a forward pass or `weights_in_place`."""

    keeps_output_weight = False

    def shard(
        self,
        chunks: Sequence[torch.nn.Module],
        core: TransformerConfig,
        groups: ProcessGroupCollection,
        device: Device,
    ) -> list["MegatronFSDPChunk"]:
        """Wrap every model chunk, initialized, in megatron-core's FSDP, wired into the schedule, or accumulation
        drifts."""
        settings = self._settings()
        wrapped = [
            MegatronFSDPChunk(core, settings, chunk, groups, device.torch_device)
            for chunk in initialized(chunks, self.config, core, groups, device)
        ]
        core.no_sync_func = for_chunks([chunk.no_sync for chunk in wrapped])
        core.grad_sync_func = for_chunks([chunk.start_grad_sync for chunk in wrapped])
        return wrapped

    def optimizer(self, chunks: Sequence[Any], groups: ProcessGroupCollection, device: Device) -> ChainedOptimizer:
        settings = optimizer_config(self.config, distributed=True, overlaps=self.config.layout.overlap_param_gather)
        built = build_optimizer(chunks, settings, self.config, groups)
        dtype = getattr(torch, self.config.training.params_dtype)
        return ChainedOptimizer([MegatronFSDPOptimizer(built, chunks, dtype, groups)])

    @contextmanager
    def gathered(self, chunks: Sequence[Any]) -> Iterator[None]:
        with self.weights_in_place(chunks):
            yield
        for chunk in chunks:
            chunk.free_gathered()  # by the forward passes of an evaluation

    @contextmanager
    def weights_in_place(self, chunks: Sequence[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.raw_parameters())
            yield

    def watch(self, chunk: Any, watcher: Watcher) -> None:
        with chunk.raw_parameters():
            for name, weight in watcher.register(chunk):
                watcher.watch(name, weight)

    def held_weights(self, chunk: Any) -> Iterator[torch.Tensor | None]:
        return chunk.held_weights()

    def held_gradients(self, chunk: Any) -> Iterator[torch.Tensor | None]:
        return chunk.held_gradients()

    def _settings(self) -> DistributedDataParallelConfig:
        layout = self.config.layout
        return ddp_config(
            self.config,
            use_distributed_optimizer=True,
            # Without it, megatron-core's FSDP reduces the gradients of no_shard and optim twice.
            overlap_grad_reduce=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=layout.data_parallel_sharding_strategy,
            outer_dp_sharding_strategy=layout.outer_dp_sharding_strategy,
            # fp32 weights are their own masters.
            megatron_fsdp_main_params_dtype=None if self.config.training.params_dtype == "float32" else torch.float32,
            megatron_fsdp_main_grads_dtype=torch.float32,
            # Or the first layers would be gathered, and kept, as soon as a step ends.
            fsdp_all_gather_in_start_param_sync=False,
        )


class MegatronFSDPChunk(FullyShardedDataParallel):
    """A model chunk, initialized, in megatron-core's FSDP."""

    param_and_grad_buffer: Any

    def __init__(
        self,
        transformer_config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        groups: ProcessGroupCollection,
        device: torch.device,
    ):
        self.strategy = ddp_config.data_parallel_sharding_strategy
        self.divides_copies = ddp_config.outer_dp_sharding_strategy != "no_shard"
        units: Any = _units(module) if self.strategy == "optim_grads_params" else []
        super().__init__(transformer_config, ddp_config, module, units, device=device, pg_collection=groups)
        self.finish_grad_sync = self._finish_grad_sync  # megatron-core sets it on the instance, too
        for sharded in self.sharded_parameters():
            if hasattr(weight_of(sharded), "allreduce"):
                sharded.allreduce = weight_of(sharded).allreduce  # megatron-core's mark of an expert
            mark(sharded, self._rows(sharded, groups))
            mark(weight_of(sharded), self._rows(sharded, groups))

    def sync_rng_states_across_tp_group(self) -> None:
        """Do nothing, despite the name: tensor-parallel ranks would draw the same dropout for different units."""

    def sharded_parameters(self) -> list[Any]:
        """Return the DTensors that the optimizer updates: fp32 masters, or the fp32 weights themselves."""
        return [parameter for _, parameter in self.param_and_grad_buffer.optimizer_named_parameters]

    @contextmanager
    def raw_parameters(self) -> Iterator[None]:
        """Return a context in which the model's parameters are its weights and not their shards; under ZeRO-3 they have
        no values."""
        fsdp: Any = self.module
        fsdp._replace_param_with_raw_if_needed()
        fsdp.is_param_fsdp_distributed = True  # or asking for a state dict would put the shards back
        try:
            yield
        finally:
            fsdp.is_param_fsdp_distributed = True  # whatever happened inside, also for the shards put back
            fsdp._replace_param_with_raw_if_needed()

    def _finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait for the reductions; under ZeRO-3 free the gathered weights.

        megatron-core keeps weights that are in no unit, for other modules might read them. Nobody does between steps,
        and the next forward pass gathers them anew in any case.
        """
        fsdp: Any = self.module
        fsdp.finish_grad_sync(force_all_reduce)
        self.free_gathered()

    def free_gathered(self) -> None:
        """Free the weights that forward passes have gathered, under ZeRO-3."""
        if self.strategy == "optim_grads_params":
            fsdp: Any = self.module
            fsdp.all_gather_pipeline.reset(preserve_non_fsdp_units=False)

    def install_rows(self) -> None:
        """Make the next passes compute with the values written into the rows."""
        fsdp: Any = self.module
        fsdp.install_optimized_model_weights()
        self.free_gathered()
        if self.strategy in ("optim", "optim_grads"):
            fsdp.start_param_sync(force_sync=True)

    def held_weights(self) -> Iterator[torch.Tensor | None]:
        """Yield the memory of the weights: the buffers, gathered weights that are not yet freed, the modules' own
        weights."""
        for group in self.param_and_grad_buffer.parameter_groups:
            yield from (weight.data for weight in group.params)
            # Where copies are divided, a rank's weights are in the second, of which its own rows are a part.
            yield from _held(group.model_weight_buffer)
            yield from _held(group.hfsdp_helper_wbuf)

    def held_gradients(self) -> Iterator[torch.Tensor | None]:
        """Yield the tensors that hold its gradients."""
        for group in self.param_and_grad_buffer.parameter_groups:
            yield from _held(group.main_grad_buffer)
            yield from _held(group.hfsdp_helper_gbuf)

    def _rows(self, sharded: Any, groups: ProcessGroupCollection) -> RowShard:
        weight, local = weight_of(sharded), sharded._local_tensor
        if self.strategy == "no_shard":
            return RowShard(local, 0, tuple(weight.shape), None, groups.dp_cp.rank())
        buffers = self.param_and_grad_buffer
        group: Any = buffers.parameter_groups[buffers.param_to_param_group[weight]]
        buffer = group.main_weight_buffer or group.model_weight_buffer
        shards, copies = (
            (groups.intra_expt_dp, groups.expt_dp) if group.is_expert_param else (groups.intra_dp_cp, groups.dp_cp)
        )
        if self.divides_copies:
            shards = copies
        start, stop = buffer._get_item_slice_in_shard(buffer.param_idx[weight])
        row = math.prod(weight.shape[1:])
        assert start % row == 0, "rows are not cut"
        assert stop - start == local.numel()
        return RowShard(local, start // row, tuple(weight.shape), shards, copies.rank() // shards.size())


def _units(module: torch.nn.Module) -> list[type[torch.nn.Module]]:
    """Return the classes of modules whose weights are gathered together; a module inside another one belongs to the
    outer.

    Tied word embeddings are read at both ends of the forward pass, and are in no unit.
    """
    kinds: list[type[torch.nn.Module]] = [TransformerLayer]
    for part in module.modules():
        output_layer: Any = getattr(part, "output_layer", None)
        if output_layer is not None and output_layer.weight is not None:
            kinds += [LanguageModelEmbedding, type(output_layer)]
    return kinds


def weight_of(sharded: Any) -> Any:
    """Return the model's weight that a sharded parameter stands for."""
    return sharded.orig_param


def _held(buffer: Any) -> Iterator[torch.Tensor | None]:
    if buffer is not None:
        yield buffer.data
        yield from (bucket.data for bucket in getattr(buffer.temporary_bucket_allocator, "buckets", {}).values())


def _holders_of_one_copy(chunk: MegatronFSDPChunk, groups: ProcessGroupCollection) -> Any:
    """Return the ranks over which the norm of the gradients is summed."""
    if chunk.divides_copies:
        return torch.distributed.group.WORLD
    return groups.mp if chunk.strategy == "no_shard" else groups.intra_dist_opt


class MegatronFSDPOptimizer(RowShards, DistributedOptimizer):
    """megatron-core's distributed optimizer in the form that its FSDP uses, over rows."""

    def __init__(
        self,
        optimizer: DistributedOptimizer,
        chunks: Sequence[MegatronFSDPChunk],
        compute_dtype: torch.dtype,
        groups: ProcessGroupCollection,
    ):
        super().__init__(
            optimizer.optimizer,
            optimizer.config,
            optimizer.grad_scaler,  # pyright: ignore[reportArgumentType]
            optimizer.init_state_fn,
            list(chunks),
            per_model_buffers={},
            data_parallel_group=groups.dp_cp,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )
        self.grad_stats_parallel_group = _holders_of_one_copy(chunks[0], groups)
        self.tp_group = self.expert_tp_group = groups.tp
        self.take_rows(compute_dtype, weight_of)

    def _copy_model_grads_to_main_grads(self) -> None:
        self.attach_gradients()

    def reload_model_params(self, state_dict: None = None) -> None:
        """Copy the rows to the weights, the reverse of the name: the rows are the masters."""
        for chunk in self.model_chunks:
            assert isinstance(chunk, MegatronFSDPChunk)
            chunk.install_rows()
