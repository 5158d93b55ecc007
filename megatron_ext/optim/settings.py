"""megatron-core's optimizer settings from our configuration, and the two that change at every step."""

import torch
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer.optimizer import ChainedOptimizer

from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.config.schema import Config


def optimizer_config(config: Config, *, distributed: bool, overlaps: bool) -> CoreOptimizerConfig:
    """megatron-core's optimizer settings. Learning rate and weight decay are set anew at every step.

    Args:
        distributed: whether to use megatron-core's distributed optimizer (decided by the sharding scheme).
        overlaps: whether the next forward pass gathers what was updated.
    """
    optimizer, training, traits = config.optimizer, config.training, traits_of(config.optimizer)
    return CoreOptimizerConfig(
        optimizer=traits.built_as,
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        decoupled_lr=optimizer.decoupled_lr,
        decoupled_min_lr=optimizer.decoupled_min_lr,
        weight_decay=optimizer.weight_decay,
        fp16=training.fp16,
        bf16=training.bf16,
        params_dtype=getattr(torch, training.params_dtype),
        loss_scale=training.loss_scale,
        initial_loss_scale=training.initial_loss_scale,
        min_loss_scale=training.min_loss_scale,
        loss_scale_window=training.loss_scale_window,
        hysteresis=training.hysteresis,
        **({name: getattr(optimizer, name) for name in traits.flags} if traits.is_the_engines else {}),
        use_distributed_optimizer=distributed,
        overlap_param_gather=overlaps,
        clip_grad=optimizer.clip_grad,
        log_num_zeros_in_grad=config.logging.log_num_zeros_in_grad,
    )


def set_rates(
    optimizer: ChainedOptimizer, learning_rate: float, weight_decay: float, decoupled: float | None = None
) -> None:
    """Give every parameter group this step's learning rate and weight decay, times the group's own factors, and the
    rate without them.

    Args:
        decoupled: rate of the word embeddings and the output layer, where --decoupled-lr gives them one of their own.
    """
    for group in optimizer.param_groups:
        group["scheduled_lr"] = learning_rate
        own = decoupled is not None and group["is_decoupled_lr"]
        group["lr"] = (decoupled if own else learning_rate) * group["lr_mult"]
        group["weight_decay"] = weight_decay * group["wd_mult"]
