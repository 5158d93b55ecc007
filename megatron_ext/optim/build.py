"""Data-parallel wrapping and the optimizer, as megatron-core builds them, from our configuration."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from megatron_ext.config.schema import Config
from megatron_ext.optim.fsdp2 import TorchFSDP
from megatron_ext.optim.megatron_fsdp import MegatronFSDPChunk, MegatronFSDPOptimizer
from megatron_ext.optim.offload import torch_rule
from megatron_ext.optim.row_shards import HostRowOptimizer, RowShardOptimizer


def ddp_config(config: Config) -> DistributedDataParallelConfig:
    """How gradients are reduced over the data-parallel ranks."""
    training, layout = config.training, config.layout
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=training.accumulate_allreduce_grads_in_fp32,
        overlap_param_gather=layout.overlap_param_gather,
        use_distributed_optimizer=layout.use_distributed_optimizer or layout.use_megatron_fsdp,
        num_distributed_optimizer_instances=layout.num_distributed_optimizer_instances,
        bucket_size=layout.ddp_bucket_size,
        # Without it, megatron-core's FSDP reduces the gradients of no_shard and optim twice.
        overlap_grad_reduce=layout.overlap_grad_reduce or layout.use_megatron_fsdp,
        **_megatron_fsdp_settings(config),
    )


def _megatron_fsdp_settings(config: Config) -> dict[str, Any]:
    layout = config.layout
    if not layout.use_megatron_fsdp:
        return {}
    return {
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": layout.data_parallel_sharding_strategy,
        "outer_dp_sharding_strategy": layout.outer_dp_sharding_strategy,
        # fp32 weights are their own masters.
        "megatron_fsdp_main_params_dtype": None if config.training.params_dtype == "float32" else torch.float32,
        "megatron_fsdp_main_grads_dtype": torch.float32,
        # Or the first layers would be gathered, and kept, as soon as a step ends.
        "fsdp_all_gather_in_start_param_sync": False,
    }


def optimizer_config(config: Config) -> CoreOptimizerConfig:
    """megatron-core's optimizer settings. Learning rate and weight decay are set anew at every step."""
    optimizer, training = config.optimizer, config.training
    return CoreOptimizerConfig(
        optimizer=optimizer.optimizer,
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        fp16=training.fp16,
        bf16=training.bf16,
        params_dtype=getattr(torch, training.params_dtype),
        loss_scale=training.loss_scale,
        initial_loss_scale=training.initial_loss_scale,
        min_loss_scale=training.min_loss_scale,
        loss_scale_window=training.loss_scale_window,
        hysteresis=training.hysteresis,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_eps,
        sgd_momentum=optimizer.sgd_momentum,
        use_distributed_optimizer=config.layout.use_distributed_optimizer or config.layout.use_megatron_fsdp,
        overlap_param_gather=config.layout.overlap_param_gather,
        clip_grad=optimizer.clip_grad,
        log_num_zeros_in_grad=config.logging.log_num_zeros_in_grad,
    )


def wrap_data_parallel(
    chunks: list[torch.nn.Module],
    config: Config,
    transformer_config: TransformerConfig,
    groups: ProcessGroupCollection,
) -> list[DistributedDataParallel]:
    """Wrap every model chunk in megatron-core's DDP, and wire its hooks into the pipeline schedule.

    The schedule must know when it may skip the reduction (all microbatches but the last) and, with overlap,
    when to start one; without these hooks accumulation silently drifts.
    """
    settings = ddp_config(config)
    wrapped = [
        DistributedDataParallel(
            config=transformer_config,
            ddp_config=settings,
            module=chunk,
            pg_collection=groups,
            # Later chunks of an interleaved stage reduce while others still compute: one bucket is enough.
            disable_bucketing=index > 0,
        )
        for index, chunk in enumerate(chunks)
    ]
    if settings.overlap_grad_reduce:
        transformer_config.no_sync_func = _for_chunks([chunk.no_sync for chunk in wrapped])
        transformer_config.grad_sync_func = _for_chunks([chunk.start_grad_sync for chunk in wrapped])
    if settings.overlap_param_gather:
        transformer_config.param_sync_func = _for_chunks([chunk.start_param_sync for chunk in wrapped])
    return wrapped


def shard_with_fsdp2(
    chunks: Sequence[torch.nn.Module],
    config: Config,
    transformer_config: TransformerConfig,
    groups: ProcessGroupCollection,
    device: torch.device,
) -> list[TorchFSDP]:
    """Every model chunk, from the meta device, in shards on `device` that are still to be initialized."""
    settings = ddp_config(config)
    return [TorchFSDP(config, transformer_config, settings, chunk, groups, device) for chunk in chunks]


def shard_with_megatron_fsdp(
    chunks: Sequence[torch.nn.Module],
    config: Config,
    transformer_config: TransformerConfig,
    groups: ProcessGroupCollection,
    device: torch.device,
) -> list[MegatronFSDPChunk]:
    """Every model chunk, initialized, in megatron-core's FSDP, and wired into the schedule, or accumulation drifts."""
    settings = ddp_config(config)
    wrapped = [MegatronFSDPChunk(transformer_config, settings, chunk, groups, device) for chunk in chunks]
    transformer_config.no_sync_func = _for_chunks([chunk.no_sync for chunk in wrapped])
    transformer_config.grad_sync_func = _for_chunks([chunk.start_grad_sync for chunk in wrapped])
    return wrapped


def _for_chunks(functions: list) -> Any:
    """megatron-core wants a function for one model chunk and a list for several."""
    return functions[0] if len(functions) == 1 else functions


def build_optimizer(
    chunks: Sequence[MegatronModule], config: Config, groups: ProcessGroupCollection, device: torch.device
) -> ChainedOptimizer:
    """megatron-core's optimizer over wrapped chunks whose weights are already initialized.

    With torch's Adam the fused kernel is asked for: one call for all tensors instead of a Python loop.
    """
    settings = optimizer_config(config)
    if config.layout.use_torch_fsdp2:
        settings.bf16 = False  # the shards are fp32, whatever is computed with
    optimizer = get_megatron_optimizer(settings, list(chunks), use_gloo_process_groups=False, pg_collection=groups)
    dtype = getattr(torch, config.training.params_dtype)
    if config.layout.use_megatron_fsdp:
        optimizer = ChainedOptimizer([MegatronFSDPOptimizer(optimizer, chunks, dtype, groups)])  # pyright: ignore
    assert isinstance(optimizer, ChainedOptimizer)
    if config.layout.use_torch_fsdp2:
        over_rows = partial(RowShardOptimizer, compute_dtype=dtype, groups=groups)
        if config.layout.torch_fsdp2_cpu_offload:
            rule = torch_rule(config.optimizer)
            over_rows = partial(HostRowOptimizer, compute_dtype=dtype, groups=groups, device=device, rule=rule)
        optimizer = ChainedOptimizer([over_rows(inner) for inner in optimizer.chained_optimizers])  # pyright: ignore
    for inner in optimizer.chained_optimizers:
        if isinstance(inner.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for group in inner.optimizer.param_groups:
                group["fused"] = True
    return optimizer


def set_rates(optimizer: ChainedOptimizer, learning_rate: float, weight_decay: float) -> None:
    """Give every parameter group this step's learning rate and weight decay (times the group's own factor)."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)
