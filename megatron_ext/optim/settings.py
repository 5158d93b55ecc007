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
        overlaps: whether the next forward pass gathers the updated weights.
    """
    optimizer, training, traits = config.optimizer, config.training, traits_of(config.optimizer)
    same = ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay", "clip_grad")
    of_scale = ("fp16", "bf16", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
    return CoreOptimizerConfig(
        optimizer=traits.built_as,
        **{name: getattr(optimizer, name) for name in (*same, *(traits.flags if traits.is_the_engines else ()))},
        **{name: getattr(training, name) for name in of_scale},
        params_dtype=getattr(torch, training.params_dtype),
        use_distributed_optimizer=distributed,
        overlap_param_gather=overlaps,
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
