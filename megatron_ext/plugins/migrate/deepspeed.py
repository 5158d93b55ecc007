"""Translates DeepSpeed's JSON configuration. Key names and meanings follow DeepSpeed's configuration reference.

Its curriculum of sequence lengths becomes the lines of a file for --stages:

    nearest_stages({"schedule_type": "fixed_discrete", "schedule_config.difficulty": [64, 128], ...})
    # {0: {seq_length: 64}, 100: {seq_length: 128}}

Step n has the length get_difficulty(n) of deepspeed's runtime/data_pipeline/curriculum_scheduler.py, from n = 1.
"""

import bisect
import math
from collections.abc import Mapping
from typing import Any

from megatron_ext.plugins.migrate.key_meanings import (
    FULL_RECOMPUTE,
    NEITHER,
    OFF,
    WEIGHTS_WHOLE,
    ZERO_STAGE,
    Cases,
    Combined,
    Default,
    Depends,
    Fact,
    Flags,
    NoCounterpart,
    OfOptimizer,
    Refused,
    Table,
    above_one,
    count_from,
    each_of,
    only_off,
    optimizers,
    switch,
    whole_number,
)

_BUCKET = NoCounterpart(
    "buckets are counted in parameters, not in bytes of one collective: --ddp-bucket-size, whose default fits"
)
_OFFLOAD_BUFFERS = NoCounterpart("copies between GPU and host are sized by the optimizer itself")
_LIVE = NoCounterpart("weights are gathered layer by layer and freed after use; there is no limit to set")
_CHECKPOINTING = NoCounterpart("recomputed layers keep their one input on their own device")
_ON_DEVICE = {"none": OFF, "null": OFF, "cpu": Flags("--optimizer-cpu-offload")}
_PINNED = Default("host memory is pinned on a GPU machine")
_SHOWN = NoCounterpart("what is measured and shown changes nothing of the training: --timing-log-level, --profile")
_COSINE_ALONE = Default("WarmupCosineLR alone reads it")
_RATES = ("optimizer.params.muon_lr", "optimizer.params.lr")
_REMOVED = Refused("DeepSpeed 0.19.8 does not train with it, either")
_GONE = "amp quantize_training eigenvalue elasticity curriculum_learning progressive_layer_drop weight_quantization"
_OTHER_SCHEDULES = Refused("the schedule that reads it has no counterpart")
_UNLIKE_ADAM = Refused("Adam's averages are corrected for their start")
_ROUTING = Refused("the model's own flags say how tokens are routed (--moe-router-...), not those of its sharding")

TABLE: Table = {
    "train_batch_size": Fact("global_batch_size"),
    "train_micro_batch_size_per_gpu": Fact("micro_batch_size"),
    "gradient_accumulation_steps": Fact("accumulation"),
    "gradient_clipping": Flags("--clip-grad {}"),
    "steps_per_print": Cases({"inf": Default("a step's line is short: --log-interval")}, Flags("--log-interval {}")),
    "wall_clock_breakdown": switch("--timing-log-level 2"),
    "prescale_gradients": NoCounterpart("gradients are divided once, by the tokens of the global batch"),
    "gradient_predivide_factor": NoCounterpart("gradients are reduced in fp32 with --bf16: nothing overflows"),
    "sparse_gradients": NoCounterpart("embedding gradients are dense, whose sum is the same"),
    "communication_data_type": NoCounterpart("gradients are reduced in fp32 with --bf16, else in their own precision"),
    "data_types.grad_accum_dtype": Cases(
        {
            "fp32": Flags("--accumulate-allreduce-grads-in-fp32"),
            **dict.fromkeys(("null", "fp16", "bf16"), NoCounterpart("gradients are accumulated in that, or in fp32")),
        },
        Refused("not a precision that this tool knows; write fp32, bf16 or fp16"),
    ),
    "zero_allow_untested_optimizer": Default("every optimizer here is tested with sharding"),
    "zero_force_ds_cpu_optimizer": NoCounterpart("there is one CPU optimizer, which --optimizer-cpu-offload chooses"),
    "fp16.enabled": switch("--fp16"),
    "fp16.loss_scale": Cases({"0": Default("dynamic loss scale, as without a flag")}, Flags("--loss-scale {}")),
    "fp16.initial_scale_power": Flags("--initial-loss-scale {}", lambda power: 2.0 ** whole_number(power)),
    "fp16.loss_scale_window": Flags("--loss-scale-window {}"),
    "fp16.hysteresis": Flags("--hysteresis {}"),
    "fp16.min_loss_scale": Flags("--min-loss-scale {}"),
    "fp16.auto_cast": Default("a model takes token ids, which have no precision"),
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
    "zero_optimization.offload_optimizer.device": Depends(
        "zero_optimization.stage",
        {"0": Default("ZeRO divides the optimizer from stage 1 on, and can offload it then")},
        Cases(_ON_DEVICE, Refused("offloading to disk is not supported; write cpu, which keeps it in memory")),
    ),
    "zero_optimization.offload_optimizer.pin_memory": Cases(
        {"true": _PINNED, "false": NoCounterpart("it is pinned, unless --no-pin-cpu-grads --no-pin-cpu-params")},
        NEITHER,
    ),
    "zero_optimization.offload_optimizer.ratio": Flags("--optimizer-offload-fraction {}"),
    **dict.fromkeys(
        (f"zero_optimization.offload_optimizer.{key}" for key in ("buffer_count", "pipeline_read", "pipeline_write")),
        _OFFLOAD_BUFFERS,
    ),
    "zero_optimization.offload_optimizer.fast_init": Default("the optimizer's state is made where it stays"),
    "zero_optimization.offload_param.device": Depends(
        "zero_optimization.stage",
        {
            "3": Cases(
                {"none": OFF, "null": OFF, "cpu": Flags("--torch-fsdp2-cpu-offload")},
                Refused("offloading to disk is not supported; write cpu, which keeps weights in memory"),
            )
        },
        WEIGHTS_WHOLE,
    ),
    "zero_optimization.offload_param.pin_memory": Cases(
        {"true": _PINNED, "false": Flags("--no-pin-cpu-params")}, NEITHER
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
    "zero_optimization.round_robin_gradients": Default("gradients are sharded evenly, by element"),
    "zero_optimization.zero_hpz_partition_size": NoCounterpart("no second copy of the weights inside a machine"),
    "zero_optimization.zero_quantized_weights": only_off("weights are gathered in their own precision"),
    "zero_optimization.zero_quantized_gradients": only_off("gradients are reduced in full precision"),
    **each_of(
        "use_multi_rank_bucket_allreduce parameter_alignment legacy_stage1 stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential memory_efficient_linear "
        "stage3_model_persistence_threshold pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings "
        "enable_sanity_checks save_muon_momentum_buffer_in_memory module_granularity_threshold allgather_sequential "
        "use_all_reduce_for_fetch_params prefetch_bucket_size param_persistence_threshold model_persistence_threshold "
        "max_live_parameters max_reuse_distance gather_16bit_weights_on_model_save load_from_fp32_weights "
        "stage3_gather_fp16_weights_on_model_save cpu_offload_use_pin_memory leaf_module.*",
        NoCounterpart("how shards are exchanged and kept changes nothing of what is trained"),
        "zero_optimization.",
    ),
    "zero_optimization.cpu_offload_param": Depends(
        "zero_optimization.stage", {"3": switch("--torch-fsdp2-cpu-offload")}, WEIGHTS_WHOLE
    ),
    "zero_optimization.compute_grad_norm": Default("the norm is computed where it is logged or clipped"),
    "zero_optimization.zero_quantized_nontrainable_weights": Default("every weight is trained"),
    **each_of(
        "nvme_path buffer_size max_in_cpu cpuadam_cores_perc super_offload",
        NoCounterpart("copies between GPU and host are sized by the program itself; nothing goes to a disk"),
        "zero_optimization.offload_*.",
    ),
    "zero_optimization.offload_param.buffer_count": _OFFLOAD_BUFFERS,
    "zero_optimization.zenflow.*": Refused("every gradient is used in the update that follows, none later"),
    **each_of("mics_* zeropp_loco_param", _REMOVED, "zero_optimization."),
    "optimizer.type": optimizers("deepspeed"),
    "optimizer.params.lr": Flags("--lr {}"),
    "optimizer.params.muon_lr": Flags("--lr {}"),
    "optimizer.params.adam_lr": Combined(
        "--lr-group embedding.*={0} output_layer.*={0} *norm*={0} *.bias={0} *.router.*={0}",
        _RATES,
        lambda own, other: own / other,
    ),
    "optimizer.params.ns_method": Default("both of DeepSpeed's ways compute the same iterations"),
    "optimizer.params.betas": OfOptimizer("betas"),
    "optimizer.params.eps": OfOptimizer("eps"),
    "optimizer.params.weight_decay": Flags("--weight-decay {}"),
    "optimizer.params.momentum": OfOptimizer("momentum"),
    "optimizer.params.adam_w_mode": Cases(
        {"true": Default("--optimizer adam is AdamW: decoupled weight decay")},
        Depends(
            "optimizer.type",
            {"adamw": Default("DeepSpeed's AdamW decouples its weight decay in any case")},
            Refused("--optimizer adam is AdamW: there is no Adam with weight decay inside the gradient"),
        ),
    ),
    "optimizer.params.bias_correction": Cases({"true": Default("Adam's averages are corrected")}, _UNLIKE_ADAM),
    **each_of(
        "torch_adam fused foreach capturable differentiable fp32_optimizer_states",
        Default("the fused kernel is used where there is one, and state is in fp32"),
        "optimizer.params.",
    ),
    **each_of("amsgrad maximize nesterov dampening", only_off("no optimizer here does it"), "optimizer.params."),
    **each_of("max_grad_norm", Refused("DeepSpeed refuses it, too; write gradient_clipping"), "optimizer.params."),
    **each_of("max_coeff min_coeff", Default("Lamb alone reads it"), "optimizer.params."),
    "optimizer.legacy_fusion": NoCounterpart("the fused kernel is used where there is one"),
    "scheduler.type": Cases(
        {
            "warmuplr": Flags("--lr-decay-style constant"),
            "warmupdecaylr": Flags("--lr-decay-style linear"),
            "warmupcosinelr": Flags("--lr-decay-style cosine"),
        },
        Refused("the curves are constant, linear, cosine, inverse-square-root, WSD and power: --lr-decay-style"),
    ),
    "scheduler.params.warmup_min_lr": Flags("--lr-warmup-init {}"),
    "scheduler.params.warmup_max_lr": Flags("--lr {}"),
    "scheduler.params.warmup_min_ratio": Depends(
        "scheduler.type", {"warmupcosinelr": Combined("--lr-warmup-init {}", _RATES)}, _COSINE_ALONE
    ),
    "scheduler.params.cos_min_ratio": Depends(
        "scheduler.type", {"warmupcosinelr": Combined("--min-lr {}", _RATES)}, _COSINE_ALONE
    ),
    # DeepSpeed takes 2 in the place of 1.
    "scheduler.params.warmup_num_steps": Flags("--lr-warmup-iters {}", lambda steps: max(2, count_from(1)(steps))),
    "scheduler.params.total_num_steps": Flags("--lr-decay-iters {}"),
    "scheduler.params.warmup_type": Cases(
        {"linear": Default("the warmup is linear")},
        Refused("the warmup is linear here, not logarithmic: write linear if that will do"),
    ),
    "scheduler.params.last_batch_iteration": Cases({"-1": OFF}, Refused("a run goes on by --load")),
    **each_of("lr_range_test_* cycle_* decay_*", _OTHER_SCHEDULES, "scheduler.params."),
    "pipeline.stages": Cases(
        {"auto": Refused("the number of stages does not stand in the file; write it")}, Fact("pipeline")
    ),
    "pipeline.partition_method": Cases(
        {"uniform": Default("every stage has the same number of layers")},
        NoCounterpart("every stage has the same number of layers, unless flags for the first and last stage say so"),
    ),
    "pipeline.partition": NoCounterpart("every stage has the same number of layers"),
    "pipeline.seed_layers": Default("weights are a function of the seed and the parameter's name"),
    **each_of("pipeline.*_partitioned", NoCounterpart("--sequence-parallel divides activations")),
    "pipeline.activation_checkpoint_interval": Cases({"0": OFF}, Flags(FULL_RECOMPUTE)),
    "activation_checkpointing.partition_activations": Cases(
        {"false": OFF}, NoCounterpart("--sequence-parallel stores activations once instead of on every rank")
    ),
    "activation_checkpointing.number_checkpoints": NoCounterpart("--recompute-num-layers counts layers of a unit"),
    "activation_checkpointing.cpu_checkpointing": _CHECKPOINTING,
    "activation_checkpointing.contiguous_memory_optimization": _CHECKPOINTING,
    "activation_checkpointing.synchronize_checkpoint_boundary": _CHECKPOINTING,
    "activation_checkpointing.profile": _SHOWN,
    "tensorboard.enabled": Default("--tensorboard-dir turns it on"),
    "tensorboard.output_path": Flags("--tensorboard-dir {}"),
    "wandb.enabled": Default("--wandb-project turns it on"),
    "wandb.project": Flags("--wandb-project {}"),
    "wandb.team": Flags("--wandb-entity {}"),
    "flops_profiler.enabled": switch("--log-throughput"),
    **each_of("flops_profiler.* csv_monitor.* comet.* comms_logger.* timers.* wandb.group tensorboard.*", _SHOWN),
    **each_of("autotuning.* aio.*", NoCounterpart("DeepSpeed's own tools and its disk read it, no training step")),
    **each_of("dump_state memory_breakdown log_level vocabulary_size", _SHOWN),
    "tensor_parallel.autotp_size": Cases({"0": OFF, "1": OFF}, Fact("tensor")),
    "tensor_parallel.tp.tp_size": above_one(Fact("tensor")),
    "tensor_parallel.tensor_parallel.tp_size": above_one(Fact("tensor")),
    "tensor_parallel.tp_overlap_comm": NoCounterpart(
        "without --sequence-parallel the sums of products wait for them; with it --tp-comm-overlap overlaps both"
    ),
    "tensor_parallel.*": Default("every weight of a model is divided by its name; the numbers are the same"),
    "expert_parallel.enabled": Default("autoep_size says over how many ranks"),
    "expert_parallel.autoep_size": above_one(Flags("--expert-model-parallel-size {}")),
    "expert_parallel.expert_tensor_parallel_size": above_one(Flags("--expert-tensor-parallel-size {}")),
    **each_of("route_norm route_scale score_* top_k num_*_groups routed_scaling_factor", _ROUTING, "expert_parallel."),
    "expert_parallel.load_balance_coeff": _ROUTING,
    "expert_parallel.*": Default("the model's config.json says where its experts are; the rest is speed"),
    "sequence_parallel_size": above_one(Fact("context")),
    "data_parallel_size": Fact("shard"),
    **each_of(
        "managed_gradient_accumulation seq_parallel_communication_data_type disable_allgather disable_python_gc "
        "use_data_before_expert_parallelism",
        NoCounterpart("how ranks exchange tensors and accumulate is the program's; the sums are the same"),
    ),
    "gradient_allreduce_op": Cases({"mean": OFF}, Refused("gradients are a mean over all tokens of a step")),
    "dataloader_drop_last": Default("a run has no last batch: the data begins anew"),
    "torch_autocast.enabled": only_off("weights are in half precision, next to fp32 masters: write bf16.enabled"),
    "torch_autocast.*": OFF,
    **each_of(
        "bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states", only_off("masters and state are in fp32")
    ),
    **each_of(
        "param_dtype buffer_dtype keep_in_fp32_modules",
        Refused("--bf16 or --fp16 is the precision of all weights"),
        "data_types.",
    ),
    "checkpoint.load_universal": NoCounterpart("checkpoints load into any layout"),
    **each_of("checkpoint.* datastates* nebula.*", NoCounterpart("checkpoints are written into --save")),
    "compile.deepcompile": NoCounterpart("--torch-compile compiles the layers"),
    "compile.*": NoCounterpart("--torch-compile chooses its passes itself"),
    "hybrid_engine.enabled": only_off("nothing is generated while training"),
    "hybrid_engine.*": OFF,
    "data_efficiency.enabled": only_off("--stages gives lengths by step; no tokens are left out of layers"),
    "data_efficiency.*": OFF,
    **{f"{name}.enabled": only_off(_REMOVED.reason) for name in _GONE.split()},
    **{f"{name}.*": _REMOVED for name in _GONE.split()},
    **each_of("compression_training* sparse_attention* graph_harvesting", _REMOVED),
}

IMPLIED = {
    "scheduler.type": "in a warmup, and in WarmupDecayLR's decay, DeepSpeed's rates come one update later: its first "
    "two updates have the lowest rate",
}
"""Flags that a key brings with it and that the file does not say."""

DEFAULTS: dict[str, tuple[str, Any]] = {
    "scheduler.params.warmup_type": ("scheduler.type", "log"),
    "scheduler.params.warmup_num_steps": ("scheduler.type", 1000),
    "scheduler.params.cos_min_ratio": ("scheduler.type", 0.0001),
    "optimizer.params.weight_decay": ("optimizer.type", 0),
    "gradient_clipping": ("optimizer.type", 0),
}
"""Keys, each with another next to which leaving it out means a value that is not our default."""

# A scheduler sets the rates at every step, whatever the optimizer's were.
SHADOWED = dict.fromkeys(
    (f"optimizer.params.{name}" for name in ("lr", "muon_lr", "adam_lr")), "scheduler.params.warmup_max_lr"
)
DEFAULT_ACCUMULATION = None
"""DeepSpeed derives whichever of its three batch sizes is not given."""


_MOST_STAGES = 16
"""Largest number of stages: each costs a checkpoint and the construction of the run, and DeepSpeed's lengths grow by 8
at a time."""


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
