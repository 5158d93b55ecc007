"""Translates the JSON that torchtitan 0.3 writes of its configuration (`--debug.save_config_file`)."""

from collections.abc import Mapping
from typing import Any

from megatron_ext.plugins.migrate.key_meanings import (
    FULL_SHARD,
    NEITHER,
    NORMS_WITHOUT_DECAY,
    OFF,
    PLAIN_DECODER,
    SHARD_GRAD,
    SHOWN,
    TEXT_BEFORE,
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
    each_of,
    only_off,
    switch,
)

_MODEL, _LAYER = "model_spec.model.", "model_spec.model.layers.*."
_ROPE = f"{_LAYER}attention.rope."
_STAGES = "parallelism.pipeline_parallel_degree"
_GROUP = "optimizer.param_groups.*."
_RATE = "optimizer.param_groups.0.optimizer_kwargs.lr"
_SHAPES = Default("the sizes of a product follow from those of its layer")
_BEGIN = NoCounterpart("how a weight begins is written as a function, which cannot be read: --init-method-std")
_EXPERTS = Refused("its experts are not translated: give --num-experts and the flags of docs/experts.md")
_KERNELS = NoCounterpart("the program chooses its own kernels, which changes numbers by rounding alone")
_RECOMPUTED = NoCounterpart("what is computed anew changes no number: --recompute-granularity selective, or full")
_TRAFFIC = NoCounterpart("how ranks exchange tensors changes no number")
_CHECKPOINTS = NoCounterpart("a run goes on by --load; weights of others come by way of Hugging Face: --load-hf")
_LAYERS = "its layers are not all alike, of which this tool reads none: give the model's flags, or --load-hf"
_DIFFERENT = "differ"


def normalized(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the file with one layer in the place of equal layers, their number as `n_layers`, and the folder of
    checkpoints as a whole path."""
    content = {**content}
    spec, checkpoint = content.get("model_spec"), content.get("checkpoint")
    model = spec.get("model") if isinstance(spec, Mapping) else None
    layers = model.get("layers") if isinstance(model, Mapping) else None
    if isinstance(spec, Mapping) and isinstance(model, Mapping) and isinstance(layers, list) and layers:
        alike = len(layers) == 1 or all(_shape(layer) == _shape(layers[0]) for layer in layers)
        one = {**model, "n_layers": len(layers) if alike else _DIFFERENT, "layers": layers[:1]}
        content["model_spec"] = {**spec, "model": one}
    if isinstance(checkpoint, Mapping) and isinstance(checkpoint.get("folder"), str) and content.get("dump_folder"):
        content["checkpoint"] = {**checkpoint, "folder": f"{content['dump_folder']}/{checkpoint['folder']}"}
    return content


def _shape(part: Any) -> Any:
    """Return a part of a model without the functions that fill its weights."""
    if isinstance(part, Mapping):
        return {name: _shape(value) for name, value in part.items() if name != "param_init"}
    return [_shape(one) for one in part] if isinstance(part, list) else part


TABLE: Table = {
    "model_spec.name": Cases(
        {"llama3": Flags(f"{PLAIN_DECODER} --swiglu"), "qwen3": Flags(f"{PLAIN_DECODER} --swiglu")},
        Refused("of torchtitan's models llama3 and qwen3 are read: give the model's flags, or --load-hf"),
    ),
    "model_spec.flavor": SHOWN,
    f"{_MODEL}n_layers": Cases({_DIFFERENT: Refused(_LAYERS)}, Flags("--num-layers {}")),
    f"{_MODEL}dim": Flags("--hidden-size {}"),
    f"{_MODEL}vocab_size": Flags("--vocab-size {}"),
    f"{_MODEL}norm.eps": Flags("--normalization RMSNorm --norm-epsilon {}"),
    f"{_MODEL}enable_weight_tying": Cases(
        {"true": OFF, "false": Flags("--untie-embeddings-and-output-weights")}, NEITHER
    ),
    f"{_LAYER}attention.n_heads": Flags("--num-attention-heads {}"),
    f"{_LAYER}attention.n_kv_heads": Flags("--group-query-attention --num-query-groups {}"),
    f"{_LAYER}attention.qkv_linear.head_dim": Flags("--kv-channels {}"),
    f"{_LAYER}attention.qk_norm.normalized_shape": Flags("--qk-layernorm"),
    f"{_LAYER}attention.inner_attention.*": _KERNELS,
    f"{_LAYER}feed_forward.w1.out_features": Flags("--ffn-hidden-size {}"),
    f"{_ROPE}theta": Flags("--rotary-base {}"),
    f"{_ROPE}scaling": Cases(
        {"none": OFF, "llama": Flags("--use-rope-scaling")}, Refused("of scaled positions, llama's are read")
    ),
    **{
        f"{_ROPE}{name}": Depends("model_spec.model.layers.0.attention.rope.scaling", {"llama": meaning}, OFF)
        for name, meaning in {
            "scaling_factor": Flags("--rope-scaling-factor {}"),
            "low_freq_factor": Flags("--rope-scaling-low-freq-factor {}"),
            "high_freq_factor": Flags("--rope-scaling-high-freq-factor {}"),
            "original_max_position_embeddings": Flags("--rope-scaling-original-max-position-embeddings {}"),
        }.items()
    },
    f"{_ROPE}max_seq_len": Default("positions are computed as far as --seq-length goes"),
    f"{_ROPE}*": Default("a scaling that is not llama's reads it, or it follows from the head"),
    f"{_LAYER}moe*": _EXPERTS,
    **each_of(f"{_MODEL}*param_init* *.sharding_config*", _BEGIN),
    f"{_MODEL}*.bias": only_off("its products have no biases: leave it out, and give --add-qkv-bias or another flag"),
    f"{_MODEL}*.elementwise_affine": Cases({"true": OFF}, Refused("norms have weights")),
    f"{_MODEL}*.eps": Default("all norms have the epsilon of the last"),
    **each_of(
        "*in_features *out_features *num_embeddings *embedding_dim *normalized_shape *.dim *.n_heads *.n_kv_heads "
        "*.head_dim",
        _SHAPES,
        _MODEL,
    ),
    "hf_assets_path": Flags("--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}"),
    "dump_folder": Default("checkpoint.folder lies in it"),
    "training.local_batch_size": Depends(
        _STAGES,
        {"1": Fact("micro_batch_size"), "null": Fact("micro_batch_size")},
        Depends(
            "training.global_batch_size",
            {"-1": Fact("accumulation", "parallelism.pipeline_parallel_microbatch_size")},
            Default("microbatches of a pipeline are parallelism.pipeline_parallel_microbatch_size samples"),
        ),
    ),
    "parallelism.pipeline_parallel_microbatch_size": Depends(
        _STAGES, {"1": OFF, "null": OFF}, Fact("micro_batch_size")
    ),
    "training.global_batch_size": Cases(
        {
            "-1": Depends(
                _STAGES,
                dict.fromkeys(("1", "null"), Fact("accumulation", number=1)),
                Default("one local batch of each data-parallel rank"),
            )
        },
        Fact("global_batch_size"),
    ),
    "training.seq_len": Flags("--seq-length {}"),
    "training.max_norm": Flags("--clip-grad {}"),
    "training.steps": Flags("--train-iters {}"),
    "training.enable_cpu_offload": switch("--torch-fsdp2-cpu-offload"),
    "training.disable_cuda_graphs": NoCounterpart("--cuda-graph-impl full_iteration replays a step as a CUDA graph"),
    "training.dtype": Cases({"float32": OFF}, Refused("weights have masters in fp32: write float32")),
    "training.mixed_precision_param": Cases(
        {"bfloat16": Flags("--bf16"), "float32": OFF}, Refused("write bfloat16 or float32")
    ),
    "training.mixed_precision_reduce": Cases({"float32": OFF}, Refused("write float32")),
    **each_of("gc_freq gc_debug", NoCounterpart("--manual-gc-interval is about Python's garbage"), "training."),
    "parallelism.tensor_parallel_degree": Fact("tensor"),
    "parallelism.context_parallel_degree": above_one(Fact("context")),
    _STAGES: Fact("pipeline"),
    "parallelism.expert_parallel_degree": above_one(Flags("--expert-model-parallel-size {}")),
    "parallelism.data_parallel_replicate_degree": Fact("replicate"),
    "parallelism.data_parallel_shard_degree": Cases(
        {"-1": Default("all ranks that are left share the weights")}, Fact("shard")
    ),
    "parallelism.fsdp_reshard_after_forward": Depends(
        "parallelism.data_parallel_shard_degree",
        {"1": OFF},
        Depends(
            _STAGES,
            {
                one: Cases(
                    {"default": FULL_SHARD, "always": FULL_SHARD, "never": SHARD_GRAD},
                    Refused("write default, always or never"),
                )
                for one in ("1", "null")
            },
            Flags("--use-distributed-optimizer"),
        ),
    ),
    "parallelism.enable_sequence_parallel": Depends(
        "parallelism.tensor_parallel_degree", {"1": OFF, "null": OFF}, switch("--sequence-parallel")
    ),
    "parallelism.pipeline_parallel_schedule": NoCounterpart(
        "the order of a pipeline's passes changes no number; --num-virtual-stages-per-pipeline-rank interleaves stages"
    ),
    **each_of(
        "pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers "
        "pipeline_parallel_layers_per_stage module_fqns_per_model_part pipeline_parallel_schedule_csv",
        NoCounterpart("which stage has which layers changes no number: --pipeline-model-parallel-layout"),
        "parallelism.",
    ),
    **each_of("spmd_backend enable_fsdp_symm_mem context_parallel_*", _TRAFFIC, "parallelism."),
    f"{_GROUP}pattern": Cases({".*": OFF}, Refused("--lr-group PATTERN=FACTOR multiplies rates of some weights")),
    f"{_GROUP}optimizer_name": Cases(
        {"adamw": Flags("--optimizer adam")}, Refused("of torchtitan's optimizers AdamW is read: give --optimizer")
    ),
    f"{_GROUP}optimizer_kwargs.lr": Flags("--lr {}"),
    f"{_GROUP}optimizer_kwargs.betas": OfOptimizer("betas"),
    f"{_GROUP}optimizer_kwargs.eps": OfOptimizer("eps"),
    f"{_GROUP}optimizer_kwargs.weight_decay": Flags("--weight-decay {}"),
    f"{_GROUP}optimizer_kwargs.*": Refused("no optimizer here reads it"),
    "optimizer.implementation": _KERNELS,
    "optimizer.optimizer_factory_kwargs_by_name*": Refused("an optimizer that is not here reads it"),
    "lr_scheduler.warmup_steps": Flags("--lr-warmup-iters {}"),
    "lr_scheduler.total_steps": Flags("--lr-decay-iters {}"),
    "lr_scheduler.min_lr_factor": Combined("--min-lr {}", (_RATE,)),
    "lr_scheduler.decay_ratio": Combined(
        "--lr-decay-style WSD --lr-wsd-decay-iters {}", ("training.steps",), lambda own, steps: round(own * steps)
    ),
    "lr_scheduler.decay_type": Depends(
        "lr_scheduler.decay_ratio",
        {
            "null": Cases(
                {"linear": Flags("--lr-decay-style linear"), "cosine": Flags("--lr-decay-style cosine")},
                Refused("without decay_ratio write linear or cosine"),
            )
        },
        Cases(
            {
                "linear": Flags("--lr-wsd-decay-style linear"),
                "cosine": Flags("--lr-wsd-decay-style cosine"),
                "sqrt": Flags("--lr-wsd-decay-style minus_sqrt"),
            },
            Refused("write linear, sqrt or cosine"),
        ),
    ),
    "dataloader.num_workers": Flags("--num-workers {}"),
    "dataloader.*": TEXT_BEFORE,
    "tokenizer.*": Default("the folder of hf_assets_path has the tokenizer"),
    "checkpoint.enable": Default("--save turns it on"),
    "checkpoint.folder": Flags("--save {}"),
    "checkpoint.interval": Flags("--save-interval {}"),
    "checkpoint.keep_latest_k": Cases({"0": OFF}, Flags("--keep-last-checkpoints {}")),
    "checkpoint.async_mode": Cases({"disabled": OFF}, Flags("--async-save")),
    "checkpoint.initial_load_path": only_off("it begins with weights of others: give --load-hf with their folder"),
    **each_of(
        "initial_load_model_only initial_load_in_hf initial_load_in_hf_quantized "
        "last_save_model_only last_save_in_hf export_dtype load_step exclude_from_loading "
        "enable_first_step_checkpoint create_seed_checkpoint load_only",
        _CHECKPOINTS,
        "checkpoint.",
    ),
    "activation_checkpoint.*": _RECOMPUTED,
    "compile.enable": switch("--torch-compile"),
    "compile.*": NoCounterpart("--torch-compile compiles the layers, in its own mode"),
    "metrics.log_freq": Flags("--log-interval {}"),
    **each_of("metrics.* profiler.*", SHOWN),
    "comm.*": _TRAFFIC,
    "validator.enable": Cases({"true": OFF, "false": Flags("--eval-interval 0")}, NEITHER),
    "validator.freq": Flags("--eval-interval {}"),
    "validator.steps": Cases({"-1": OFF}, Flags("--eval-iters {}")),
    "validator.*": TEXT_BEFORE,
    "debug.seed": Flags("--seed {}"),
    "debug.deterministic": switch("--deterministic-mode"),
    "debug.moe_force_load_balance": switch("--moe-router-force-load-balancing"),
    "debug.*": SHOWN,
    "override.imports": only_off("modules of one's own change the configuration, which this tool does not import"),
    **each_of(
        "num_chunks loss_fn.global_vocab_size",
        NoCounterpart("the loss is the next token's cross-entropy, in as many pieces as fit"),
        "loss.",
    ),
}

IMPLIED = {"optimizer.param_groups.0.optimizer_kwargs.weight_decay": NORMS_WITHOUT_DECAY}
DEFAULTS: dict[str, tuple[str, Any]] = {}
SHADOWED: dict[str, str] = {}
DEFAULT_ACCUMULATION = None
