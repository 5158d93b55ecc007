"""Translates DeepSpeed's JSON configuration. Key names and meanings are those of DeepSpeed's configuration
reference.

Its curriculum of sequence lengths becomes the lines of a file for --stages:

    nearest_stages({"schedule_type": "fixed_discrete", "schedule_config.difficulty": [64, 128], ...})
    # {0: {seq_length: 64}, 100: {seq_length: 128}}

Step n has the length get_difficulty(n) of deepspeed's runtime/data_pipeline/curriculum_scheduler.py, from n = 1.
"""

import bisect
import math
from collections.abc import Mapping
from typing import Any

from megatron_ext.foreign.key_meanings import (
    FULL_RECOMPUTE,
    OFF,
    ZERO_STAGE,
    Cases,
    Default,
    Fact,
    Flags,
    NoCounterpart,
    OfOptimizer,
    Table,
    only_off,
    optimizers,
    switch,
)

_BUCKET = NoCounterpart(
    "buckets are counted in parameters, not in bytes of one collective: --ddp-bucket-size, whose default fits"
)
_OFFLOAD_BUFFERS = NoCounterpart("copies between GPU and host are sized by the optimizer itself")
_LIVE = NoCounterpart("weights are gathered layer by layer and freed after use; there is no limit to set")
_CHECKPOINTING = NoCounterpart("recomputed layers keep their one input on their own device")
_ON_DEVICE = {"none": OFF, "null": OFF, "cpu": Flags("--optimizer-cpu-offload")}

TABLE: Table = {
    "train_batch_size": Fact("global_batch_size"),
    "train_micro_batch_size_per_gpu": Fact("micro_batch_size"),
    "gradient_accumulation_steps": Fact("accumulation"),
    "gradient_clipping": Flags("--clip-grad {}"),
    "steps_per_print": Flags("--log-interval {}"),
    "wall_clock_breakdown": switch("--timing-log-level 2"),
    "prescale_gradients": only_off("gradients are divided once, by the global batch's tokens, after the reduction"),
    "gradient_predivide_factor": NoCounterpart("gradients are reduced in fp32 with --bf16: nothing overflows"),
    "sparse_gradients": only_off("embedding gradients are dense"),
    "communication_data_type": NoCounterpart("gradients are reduced in fp32 with --bf16, else in their own precision"),
    "data_types.grad_accum_dtype": Cases(
        {"fp32": Flags("--accumulate-allreduce-grads-in-fp32")},
        NoCounterpart("gradients are accumulated in their own precision, or in fp32"),
    ),
    "zero_allow_untested_optimizer": Default("every optimizer here is tested with sharding"),
    "zero_force_ds_cpu_optimizer": NoCounterpart("there is one CPU optimizer, which --optimizer-cpu-offload chooses"),
    "fp16.enabled": switch("--fp16"),
    "fp16.loss_scale": Cases({"0": Default("dynamic loss scale, as without a flag")}, Flags("--loss-scale {}")),
    "fp16.initial_scale_power": Flags("--initial-loss-scale {}", lambda power: 2 ** int(power)),
    "fp16.loss_scale_window": Flags("--loss-scale-window {}"),
    "fp16.hysteresis": Flags("--hysteresis {}"),
    "fp16.min_loss_scale": Flags("--min-loss-scale {}"),
    "fp16.auto_cast": only_off("weights and activations are in half precision throughout; the loss is in fp32"),
    "fp16.consecutive_hysteresis": only_off("a good step does not restore the hysteresis"),
    "fp16.fp16_master_weights_and_grads": only_off("master weights are in fp32"),
    "bf16.enabled": switch("--bf16"),
    "bf16.immediate_grad_update": Default("gradients are added where they are computed"),
    "bf16.check_grad_overflow": Default("a NaN or an infinity ends the run"),
    "zero_optimization.stage": ZERO_STAGE,
    "zero_optimization.cpu_offload": switch("--optimizer-cpu-offload"),
    **dict.fromkeys(
        (f"zero_optimization.{key}" for key in ("elastic_checkpoint", "ignore_unused_parameters")),
        Default("checkpoints load into any layout, and weights without a gradient are no error"),
    ),
    "zero_optimization.offload_optimizer.device": Cases(
        _ON_DEVICE, NoCounterpart("offloading to disk is not supported; --optimizer-cpu-offload keeps it in memory")
    ),
    "zero_optimization.offload_optimizer.pin_memory": Cases(
        {"true": Default("host memory is pinned on a GPU machine")},
        NoCounterpart("host memory is pinned on a GPU machine, unless --no-pin-cpu-grads --no-pin-cpu-params"),
    ),
    "zero_optimization.offload_optimizer.ratio": Flags("--optimizer-offload-fraction {}"),
    **dict.fromkeys(
        (f"zero_optimization.offload_optimizer.{key}" for key in ("buffer_count", "pipeline_read", "pipeline_write")),
        _OFFLOAD_BUFFERS,
    ),
    "zero_optimization.offload_optimizer.fast_init": Default("the optimizer's state is made where it stays"),
    "zero_optimization.offload_param.device": Cases(
        {"none": OFF, "null": OFF, "cpu": Flags("--torch-fsdp2-cpu-offload")},
        NoCounterpart("offloading to disk is not supported; --torch-fsdp2-cpu-offload keeps weights in memory"),
    ),
    "zero_optimization.offload_param.pin_memory": Cases(
        {"true": Default("host memory is pinned on a GPU machine"), "false": Flags("--no-pin-cpu-params")},
        NoCounterpart("neither true nor false"),
    ),
    "zero_optimization.allgather_partitions": Default("weights are gathered by all-gather collectives"),
    "zero_optimization.allgather_bucket_size": _BUCKET,
    "zero_optimization.reduce_scatter": Default("sharded gradients are reduced by reduce-scatter collectives"),
    "zero_optimization.reduce_bucket_size": _BUCKET,
    "zero_optimization.overlap_comm": switch("--overlap-grad-reduce"),
    "zero_optimization.contiguous_gradients": Default("gradients lie in contiguous buffers"),
    "zero_optimization.sub_group_size": NoCounterpart("the update runs over all of a rank's shards at once"),
    "zero_optimization.stage3_prefetch_bucket_size": _LIVE,
    "zero_optimization.stage3_param_persistence_threshold": _LIVE,
    "zero_optimization.stage3_max_live_parameters": _LIVE,
    "zero_optimization.stage3_max_reuse_distance": _LIVE,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Default(
        "checkpoints are sharded; `megatron-ext convert to-hf` writes the whole model"
    ),
    "zero_optimization.round_robin_gradients": only_off("gradients are sharded evenly, by element"),
    "zero_optimization.zero_hpz_partition_size": NoCounterpart("no second copy of the weights inside a machine"),
    "zero_optimization.zero_quantized_weights": only_off("weights are gathered in their own precision"),
    "zero_optimization.zero_quantized_gradients": only_off("gradients are reduced in full precision"),
    "optimizer.type": optimizers("deepspeed"),
    "optimizer.params.lr": Flags("--lr {}"),
    "optimizer.params.betas": OfOptimizer("betas"),
    "optimizer.params.eps": OfOptimizer("eps"),
    "optimizer.params.weight_decay": Flags("--weight-decay {}"),
    "optimizer.params.momentum": OfOptimizer("momentum"),
    "optimizer.params.adam_w_mode": Cases(
        {"true": Default("--optimizer adam is AdamW: decoupled weight decay")},
        NoCounterpart("--optimizer adam is AdamW: there is no Adam with weight decay inside the gradient"),
    ),
    "optimizer.params.torch_adam": Default("the fused kernel is used where there is one"),
    "optimizer.params.fused": Default("the fused kernel is used where there is one"),
    "scheduler.type": Cases(
        {
            "warmuplr": Flags("--lr-decay-style constant"),
            "warmupdecaylr": Flags("--lr-decay-style linear"),
            "warmupcosinelr": Flags("--lr-decay-style cosine"),
        },
        NoCounterpart("the curves are constant, linear, cosine, inverse-square-root, WSD and power: --lr-decay-style"),
    ),
    "scheduler.params.warmup_min_lr": Flags("--lr-warmup-init {}"),
    "scheduler.params.warmup_max_lr": Flags("--lr {}"),
    "scheduler.params.warmup_num_steps": Flags("--lr-warmup-iters {}"),
    "scheduler.params.total_num_steps": Flags("--lr-decay-iters {}"),
    "scheduler.params.warmup_type": Cases(
        {"linear": Default("the warmup is linear")}, NoCounterpart("the warmup is linear, not logarithmic")
    ),
    "pipeline.stages": Cases(
        {"auto": NoCounterpart("give the number of stages: --pipeline-model-parallel-size")}, Fact("pipeline")
    ),
    "pipeline.partition_method": Cases(
        {"uniform": Default("every stage has the same number of layers")},
        NoCounterpart("every stage has the same number of layers, unless flags for the first and last stage say so"),
    ),
    "pipeline.activation_checkpoint_interval": Cases({"0": OFF}, Flags(FULL_RECOMPUTE)),
    "activation_checkpointing.partition_activations": Cases(
        {"false": OFF}, NoCounterpart("--sequence-parallel stores activations once instead of on every rank")
    ),
    "activation_checkpointing.number_checkpoints": NoCounterpart("--recompute-num-layers counts layers of a unit"),
    "activation_checkpointing.cpu_checkpointing": only_off("recomputed layers keep their one input on the GPU"),
    "activation_checkpointing.contiguous_memory_optimization": _CHECKPOINTING,
    "activation_checkpointing.synchronize_checkpoint_boundary": _CHECKPOINTING,
    "activation_checkpointing.profile": only_off("--timing-log-level 2 times the parts of a step"),
    "tensorboard.enabled": Default("--tensorboard-dir turns it on"),
    "tensorboard.output_path": Flags("--tensorboard-dir {}"),
    "wandb.enabled": Default("--wandb-project turns it on"),
    "wandb.project": Flags("--wandb-project {}"),
    "wandb.team": Flags("--wandb-entity {}"),
    "flops_profiler.enabled": switch("--log-throughput"),
}

IMPLIED = {
    "scheduler.type": "DeepSpeed's warmup is logarithmic unless warmup_type says linear; ours is linear",
    "optimizer.type": "DeepSpeed's Adam decouples its weight decay too, unless adam_w_mode is false",
}
"""Flags that a key brings with it and that the file does not say."""

# A scheduler sets the rate at every step, whatever the optimizer's was.
SHADOWED = {"optimizer.params.lr": "scheduler.params.warmup_max_lr"}
DEFAULT_ACCUMULATION = None
"""DeepSpeed derives whichever of its three batch sizes is not given."""


_MOST_STAGES = 16
"""Stages: each costs a checkpoint and the construction of the run, and lengths grow by 8 there."""


def nearest_stages(section: Mapping[str, Any]) -> str | None:
    """Return the content of the file, in one line of YAML; None where the section gives no lengths.

    Args:
        section: the values of `curriculum_learning`, by their dotted keys below it.
    """
    try:
        find = {"fixed_discrete": _discrete, "fixed_linear": _root, "fixed_root": _root}[section["schedule_type"]]
        stages = find({key.removeprefix("schedule_config."): value for key, value in section.items()})
    except (ArithmeticError, KeyError, TypeError, ValueError):
        return None
    return f"{{{', '.join(f'{first}: {{seq_length: {length}}}' for first, length in stages.items())}}}"


def _discrete(section: Mapping[str, Any]) -> dict[int, int]:
    return dict(zip([0, *map(int, section["max_step"])], map(int, section["difficulty"]), strict=True))


def _root(section: Mapping[str, Any]) -> dict[int, int]:
    low, high, total, by = (
        int(section[key]) for key in ("min_difficulty", "max_difficulty", "total_curriculum_step", "difficulty_step")
    )
    degree = int(section["root_degree"] if section["schedule_type"] == "fixed_root" else 1)
    start = -(-low // by) * by

    def length(step: int) -> int:
        grown = math.floor((step / total) ** (1 / degree) * (high - low) + low)
        return min(max(grown - grown % by, start), high)

    lengths = range(start, high, by)
    shown = lengths[:: max(1, math.ceil(len(lengths) / (_MOST_STAGES - 1)))]
    steps = range(1, 1 + total * (1 + by) ** degree)  # beyond `total` where the longest is no multiple of the step
    return {bisect.bisect_left(steps, one, key=length): one for one in (*shown, high)}
