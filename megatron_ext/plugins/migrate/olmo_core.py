"""Translates OLMo-core's configuration, as version 3 writes it (`config.json` of a checkpoint) or a launch has it as
YAML. Batches are counted in tokens there."""

import re
from collections.abc import Mapping
from math import ceil
from typing import Any

from megatron_ext.plugins.migrate.key_meanings import (
    EPOCHS,
    FULL_RECOMPUTE,
    NEITHER,
    NORMS_WITHOUT_DECAY,
    OFF,
    PLAIN_DECODER,
    SAME_NUMBERS,
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
    only,
    only_off,
    switch,
)

_BLOCK = "model.block."
_MIXER = f"{_BLOCK}sequence_mixer."
_RATE = "train_module.optim.lr"
_LENGTH = "dataset.sequence_length"
_BATCH = "data_loader.global_batch_size"
_UNIT = "trainer.max_duration.unit"
_SCHEDULE = "train_module.scheduler."
_KERNELS = NoCounterpart("the program chooses its own kernels, which changes numbers by rounding alone")
_TRAFFIC = NoCounterpart("how ranks exchange tensors changes no number")
_FEEDING = NoCounterpart("how data is found and fed in changes nothing of what is trained")
_RESUMED = NoCounterpart("a run goes on by --load; weights of others come by way of Hugging Face: --load-hf")
_NORMS = {
    "rms": Flags("--normalization RMSNorm"),
    "fused_rms": Flags("--normalization RMSNorm"),
    "default": Flags("--normalization LayerNorm"),
}
_NORM = Cases(_NORMS, Refused("of its norms rms, fused_rms and default are read"))
_OTHER_SCHEDULE = Refused("the schedule that reads it has no counterpart: give --lr-decay-style")
_NOT_HERE = "no layer here does it: leave it out, or give --load-hf with a folder of the model"
_EXPERTS = Refused("its experts are not translated: give --num-experts and the flags of docs/experts.md")
_WSD_DECAYS = Depends(
    f"{_SCHEDULE}units",
    {"tokens": Combined("--lr-wsd-decay-iters {}", (_BATCH,), lambda own, batch: ceil(own / batch))},
    Flags("--lr-wsd-decay-iters {}"),
)
_WARMUP = Depends(
    f"{_SCHEDULE}units",
    {"tokens": Combined("--lr-warmup-iters {}", (_BATCH,), lambda own, batch: ceil(own / batch))},
    Flags("--lr-warmup-iters {}"),
)


def normalized(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the file with the `type` of optimizer and schedule, which older versions say by `_CLASS_` alone."""
    module = content.get("train_module")
    if not isinstance(module, Mapping):
        return content
    typed = {name: _typed(value) for name, value in module.items() if name in ("optim", "scheduler")}
    return {**content, "train_module": {**module, **typed}}


def _typed(section: Any) -> Any:
    if not isinstance(section, Mapping) or "type" in section or not isinstance(section.get("_CLASS_"), str):
        return section
    name = section["_CLASS_"].rpartition(".")[2].removesuffix("Config")
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]*", name.replace("AdamW", "Adamw"))
    return {**section, "type": "_".join(words).lower()}


TABLE: Table = {
    **each_of("_CLASS_ *._CLASS_", Default("the class that the other keys belong to")),
    "model.name": Cases({"default": Flags(PLAIN_DECODER)}, Refused("of its models the plain transformer is read")),
    "model.d_model": Flags("--hidden-size {}"),
    "model.vocab_size": Flags("--vocab-size {}"),
    "model.n_layers": Flags("--num-layers {}"),
    f"{_BLOCK}name": Cases(
        {"default": OFF, "reordered_norm": Flags("--norm-position after")},
        Refused("of its blocks default and reordered_norm are read"),
    ),
    **each_of("dropout", only_off("give --hidden-dropout"), _BLOCK),
    **each_of("*_residual_alpha", only_off(_NOT_HERE), _BLOCK),
    f"{_BLOCK}layer_norm.name": _NORM,
    f"{_BLOCK}layer_norm.eps": Flags("--norm-epsilon {}"),
    **{f"{norm}.name": _NORM for norm in (f"{_MIXER}qk_norm", "model.lm_head.layer_norm")},
    f"{_MIXER}qk_norm.eps": Flags("--qk-layernorm"),
    "model.lm_head.layer_norm.eps": Default("all norms have the epsilon of the block's"),
    **{
        f"{norm}.{name}": meaning
        for norm in (f"{_BLOCK}layer_norm", f"{_MIXER}qk_norm", "model.lm_head.layer_norm")
        for name, meaning in {
            "bias": only_off("norms of a file have no bias here: leave it out"),
            "elementwise_affine": Cases({"true": OFF}, Refused("norms have weights")),
            "full_precision": Default("norms compute in fp32"),
            "dtype": Default("weights have masters in fp32"),
        }.items()
    },
    f"{_MIXER}type": Cases({"attention": OFF}, Refused("of its mixers attention is read")),
    f"{_MIXER}name": Cases({"default": OFF, "fused": OFF}, Refused(_NOT_HERE)),
    f"{_MIXER}n_heads": Flags("--num-attention-heads {}"),
    f"{_MIXER}n_kv_heads": Flags("--group-query-attention --num-query-groups {}"),
    f"{_MIXER}head_dim": Flags("--kv-channels {}"),
    f"{_MIXER}bias": only_off("give --add-qkv-bias and --add-output-bias"),
    f"{_MIXER}use_head_qk_norm": Cases({"true": OFF, "false": Flags("--qk-layernorm-over projection")}, NEITHER),
    f"{_MIXER}rope.name": Cases({"default": OFF, "fused": OFF}, Refused("of its positions default and fused are read")),
    f"{_MIXER}rope.theta": Flags("--rotary-base {}"),
    f"{_MIXER}rope.full_precision": _KERNELS,
    f"{_MIXER}rope.partial_rotary_factor": Flags("--rotary-percent {}"),
    f"{_MIXER}rope.no_global_rope": only_off("give --no-rope-freq"),
    f"{_MIXER}rope.scaling*": Refused("give --use-rope-scaling and its flags"),
    f"{_MIXER}clip_qkv": Flags("--qkv-clip {}"),
    f"{_MIXER}dropout": Flags("--attention-dropout {}"),
    f"{_MIXER}sliding_window.*": Refused("give --window-size and --window-attn-skip-freq"),
    f"{_MIXER}gate.*": Refused("give --attention-output-gate"),
    f"{_MIXER}dtype": Default("weights have masters in fp32"),
    **each_of("scalable_softmax attention_sinks qk_norm_per_head_gains", only_off(_NOT_HERE), _MIXER),
    **each_of("mxfp8_*", only_off("products are in --bf16, or as --fp8-recipe says"), _MIXER),
    **each_of("use_flash backend use_recompute_qkv_prep", _KERNELS, _MIXER),
    f"{_BLOCK}feed_forward.hidden_size": Flags("--ffn-hidden-size {}"),
    f"{_BLOCK}feed_forward.name": Cases({"default": OFF, "fused": OFF}, Refused(_NOT_HERE)),
    f"{_BLOCK}feed_forward.activation": Cases(
        {"silu": Flags("--swiglu"), "gelu": Flags("--geglu")}, Refused("write silu or gelu")
    ),
    f"{_BLOCK}feed_forward.bias": only_off("give --add-mlp-bias"),
    f"{_BLOCK}feed_forward.dtype": Default("weights have masters in fp32"),
    f"{_BLOCK}feed_forward_moe.*": _EXPERTS,
    "model.block_overrides*": Refused("its layers are not all alike: give --load-hf with a folder of the model"),
    "model.block_pattern*": only_off("its layers are not all alike: give --load-hf with a folder of the model"),
    "model.embedding_norm.*": Refused(_NOT_HERE),
    "model.lm_head.name": Cases({"default": OFF}, Refused(_NOT_HERE)),
    "model.lm_head.bias": only_off("give --lm-head-bias"),
    "model.lm_head.dtype": Default("weights have masters in fp32"),
    "model.lm_head.loss_implementation": _KERNELS,
    "model.dtype": Cases({"float32": OFF}, Refused("weights have masters in fp32: write float32")),
    "model.init_method": Cases({"normal": OFF}, Refused("weights begin with a normal distribution: --init-method-std")),
    "model.init_std": Flags("--init-method-std {}"),
    "model.embedding_init_std": Flags("--embedding-init-method-std {}"),
    "model.init_seed": NoCounterpart("weights begin with --seed, each with its own numbers"),
    "model.freeze_params": only_off("every weight is trained"),
    "model.embed_scale": Flags("--embedding-multiplier {}"),
    "model.tie_word_embeddings": Cases({"true": OFF, "false": Flags("--untie-embeddings-and-output-weights")}, NEITHER),
    "dataset.tokenizer.identifier": Flags("--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}"),
    "dataset.tokenizer.*": Default("the tokenizer's files say it"),
    _LENGTH: Flags("--seq-length {}"),
    "dataset.max_target_sequence_length": _FEEDING,
    "dataset.generate_doc_lengths": switch("--reset-position-ids --reset-attention-mask"),
    "dataset.label_mask_paths": only_off("masks of tokens come from megatron-ext preprocess: docs/instruction_data.md"),
    "dataset.instance_filter_config.*": Refused("windows that repeat themselves are not left out: leave it out"),
    **each_of("paths mix mix_base_dir source_mixture_config.* metadata", TEXT_BEFORE, "dataset."),
    **each_of(
        "type expand_glob dtype include_instance_metadata source_permutation_seed work_dir ignore_fingerprint_mismatch",
        _FEEDING,
        "dataset.",
    ),
    _BATCH: Fact("global_batch_size", _LENGTH),
    "data_loader.seed": NoCounterpart("samples are drawn by --seed"),
    "data_loader.num_workers": Cases({"0": OFF}, Flags("--num-workers {}")),
    **each_of(
        "type work_dir num_threads prefetch_factor target_device_type ignore_fingerprint_mismatch",
        _FEEDING,
        "data_loader.",
    ),
    "train_module.rank_microbatch_size": Fact("micro_batch_size", _LENGTH),
    "train_module.max_sequence_length": Default("samples have --seq-length tokens"),
    "train_module.type": Cases({"transformer": OFF}, Refused("of its train modules the transformer's is read")),
    "train_module.optim.type": Cases(
        {
            **dict.fromkeys(("adamw", "skip_step_adamw"), Flags("--optimizer adam")),
            **dict.fromkeys(("lion", "skip_step_lion"), Flags("--optimizer lion")),
        },
        Refused("of its optimizers adamw, skip_step_adamw and lion are read: give --optimizer and its flags"),
    ),
    _RATE: Flags("--lr {}"),
    "train_module.optim.betas": OfOptimizer("betas"),
    "train_module.optim.eps": OfOptimizer("eps"),
    "train_module.optim.weight_decay": Flags("--weight-decay {}"),
    "train_module.optim.group_overrides.*.params": Cases(
        {"['embeddings.weight']": OFF},
        Refused("some weights have settings of their own: --lr-group, --weight-decay-group"),
    ),
    "train_module.optim.group_overrides.*.opts.weight_decay": Cases(
        {"0": Flags("--weight-decay-group embedding.*=0")}, Refused("embeddings have the decay, or none")
    ),
    "train_module.optim.group_overrides.*": Refused(
        "some weights have settings of their own: --lr-group PATTERN=FACTOR"
    ),
    "train_module.optim.step_increment_bugfix": Cases({"true": OFF}, Refused("the first update is the first")),
    **each_of("compile fixed_fields foreach fused dtype use_triton flatten", _KERNELS, "train_module.optim."),
    **each_of(
        "rolling_interval_length sigma_factor",
        NoCounterpart("no step is left out for its loss: --spike-threshold names those that its optimizer leaves out"),
        "train_module.optim.",
    ),
    "train_module.optim.*": Refused("an optimizer that is not read has it: give --optimizer and its flags"),
    "train_module.max_grad_norm": Flags("--clip-grad {}"),
    f"{_SCHEDULE}type": Cases(
        {
            "cos_with_warmup": Flags("--lr-decay-style cosine"),
            "linear_with_warmup": Flags("--lr-decay-style linear"),
            "constant_with_warmup": Flags("--lr-decay-style constant"),
            "constant": Flags("--lr-decay-style constant"),
            "wsd": Flags("--lr-decay-style WSD --lr-wsd-decay-style linear"),
        },
        _OTHER_SCHEDULE,
    ),
    **only("lr_field=lr initial_lr_field=initial_lr", "rates are the optimizer's lr", _SCHEDULE),
    f"{_SCHEDULE}units": Cases({"steps": OFF, "tokens": OFF}, Refused("write steps or tokens")),
    **each_of("warmup warmup_steps", _WARMUP, _SCHEDULE),
    f"{_SCHEDULE}warmup_fraction": Flags("--lr-warmup-fraction {}"),
    f"{_SCHEDULE}warmup_min_lr": Flags("--lr-warmup-init {}"),
    f"{_SCHEDULE}alpha_f": Combined("--min-lr {}", (_RATE,)),
    f"{_SCHEDULE}t_max": Depends(
        f"{_SCHEDULE}units",
        {"tokens": Combined("--lr-decay-iters {}", (_BATCH,), lambda own, batch: ceil(own / batch))},
        Flags("--lr-decay-iters {}"),
    ),
    **each_of("decay decay_steps", _WSD_DECAYS, _SCHEDULE),
    f"{_SCHEDULE}decay_fraction": Combined(
        "--lr-wsd-decay-iters {}", ("trainer.max_duration.value",), lambda own, steps: round(own * steps)
    ),
    f"{_SCHEDULE}decay_min_lr": Flags("--min-lr {}"),
    f"{_SCHEDULE}*": _OTHER_SCHEDULE,
    "train_module.compile_model": switch("--torch-compile"),
    "train_module.float8_config.enabled": only_off("give --fp8-format hybrid and --fp8-recipe"),
    "train_module.float8_config.*": Refused("give --fp8-format hybrid and --fp8-recipe"),
    "train_module.dp_config.name": Cases(
        {
            "fsdp": Flags("--use-torch-fsdp2"),
            "hsdp": Flags("--use-torch-fsdp2"),
            "ddp": Default("plain data parallelism, as without a flag"),
        },
        Refused("write fsdp, hsdp or ddp"),
    ),
    "train_module.dp_config.param_dtype": Cases(
        {"bfloat16": Flags("--bf16"), "float32": OFF}, Refused("write bfloat16 or float32")
    ),
    "train_module.dp_config.reduce_dtype": Cases({"float32": OFF}, Refused("write float32")),
    "train_module.dp_config.num_replicas": Fact("replicate"),
    "train_module.dp_config.shard_degree": Fact("shard"),
    "train_module.dp_config.*": _TRAFFIC,
    "train_module.tp_config.degree": above_one(Fact("tensor")),
    "train_module.tp_config.*": _TRAFFIC,
    "train_module.cp_config.degree": above_one(Fact("context")),
    "train_module.cp_config.*": SAME_NUMBERS,
    "train_module.pp_config.degree": above_one(Fact("pipeline")),
    "train_module.pp_config.*": NoCounterpart("the order of a pipeline's passes changes no number"),
    "train_module.ep_config.degree": above_one(Flags("--expert-model-parallel-size {}")),
    "train_module.ac_config.mode": Cases(
        {"full": Flags(FULL_RECOMPUTE.format(1))}, NoCounterpart("--recompute-granularity selective, or full")
    ),
    "train_module.ac_config.*": NoCounterpart("what is computed anew changes no number"),
    "train_module.z_loss_multiplier": Flags("--z-loss-strength {}"),
    "train_module.autocast_precision": Cases({"bfloat16": Flags("--bf16")}, Refused("write bfloat16, or dp_config")),
    "train_module.label_ignore_index": Default("no label of a corpus has it"),
    **each_of("state_dict_*_opts* load_key_mapping*", _RESUMED, "train_module."),
    "trainer.max_duration.value": Depends(
        _UNIT,
        {
            "steps": Flags("--train-iters {}"),
            "tokens": Combined("--train-iters {}", (_BATCH,), lambda own, batch: ceil(own / batch)),
        },
        EPOCHS,
    ),
    _UNIT: Cases({"steps": OFF, "tokens": OFF}, EPOCHS),
    "trainer.hard_stop.value": Depends(
        "trainer.hard_stop.unit", {"steps": Flags("--exit-interval {}")}, Refused("write it in steps: --exit-interval")
    ),
    "trainer.hard_stop.unit": Default("trainer.hard_stop.value says it"),
    "trainer.steps_to_skip.*": Refused("--skip-samples leaves out samples, by their numbers"),
    "trainer.save_folder": Flags("--save {}"),
    "trainer.metrics_collect_interval": Flags("--log-interval {}"),
    "trainer.load_path": only_off("it begins with weights of others: give --load-hf with their folder"),
    **each_of("load_* checkpointer.*", _RESUMED, "trainer."),
    "trainer.no_checkpoints": only_off("leave out save_folder"),
    "trainer.callbacks.checkpointer.enabled": Default("--save turns it on"),
    "trainer.callbacks.checkpointer.save_interval": Flags("--save-interval {}"),
    "trainer.callbacks.checkpointer.save_async": switch("--async-save"),
    "trainer.callbacks.checkpointer.*": NoCounterpart("which checkpoints are kept: --keep-last-checkpoints"),
    "trainer.callbacks.*": NoCounterpart(
        "what is shown, evaluated and kept next to the training changes nothing of it"
    ),
    **each_of(
        "work_dir device save_overwrite cancel_check_interval async_bookkeeping bookkeeping_soft_timeout "
        "no_evals checkpoints_to_eval",
        SHOWN,
        "trainer.",
    ),
    "init_seed": Flags("--seed {}"),
    **each_of("launch.* backend nproc run_name", SHOWN),
}

IMPLIED = {"train_module.optim.weight_decay": NORMS_WITHOUT_DECAY}
DEFAULTS: dict[str, tuple[str, Any]] = {}
SHADOWED: dict[str, str] = {}
DEFAULT_ACCUMULATION = None
