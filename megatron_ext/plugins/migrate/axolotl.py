"""Translates Axolotl's YAML file.

The data of an Axolotl file: which `megatron-ext preprocess` commands make it, and which flags train on it.

    datasets:                         megatron-ext preprocess --input 'hf://datasets/tatsu-lab/alpaca/**/train-*'
      - path: tatsu-lab/alpaca   ->       --data-format alpaca --on-error skip --seq-length 4096 ...
        type: alpaca                  --data-path data/train_alpaca_document --assistant-only-loss
"""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.plugins.migrate.key_meanings import (
    CHECKPOINTS,
    EPOCHS,
    FSDP,
    FSDP_VERSION,
    FULL_RECOMPUTE,
    FULL_SHARD,
    NEITHER,
    OFF,
    RESUMED,
    SAME_NUMBERS,
    SHARD_GRAD,
    Cases,
    Combined,
    Default,
    Depends,
    Each,
    Fact,
    Flags,
    NoCounterpart,
    OfOptimizer,
    Refused,
    Table,
    above_one,
    each_of,
    only_off,
    optimizers,
    switch,
)

_TEXT = NoCounterpart("text becomes tokens once, before training: megatron-ext preprocess, then --data-path")
_ADAPTER = only_off("all weights are trained; adapters and quantized weights are for fine-tuning tools")
_TRACKERS = NoCounterpart("what is shown and published changes nothing of the training: --wandb-..., --tensorboard-dir")
_WHEN = NoCounterpart("when a run is evaluated and saved: --eval-interval and --save-interval count steps")
_FEEDING = NoCounterpart("how data is prepared and fed in changes nothing of what is trained")
_KERNELS = NoCounterpart("the program chooses its own kernels, which changes numbers by rounding alone")
_MEMORY = NoCounterpart("what is computed anew or kept in host memory changes no number: --recompute-granularity")
_PLUGIN = NoCounterpart("a plugin alone reads it, of which `plugins` speaks")
_WITH_ADAPTER = Default("`adapter` alone has it read")
_WITH_RL = Default("`rl` alone has it read")
_MODEL = Refused("the model is what config.json of the folder says: change it there")
_TOKENIZER = Refused("the tokenizer is what the folder of base_model says: change it there")
_SAMPLES = Refused("megatron-ext preprocess has no such step: change the data before")
_OTHER_LOSS = only_off("the loss is that of the next token")
_PRECISION = Cases(
    {**dict.fromkeys(("true", "auto", "full"), Flags("--bf16")), "false": OFF}, Refused("not true, false, auto or full")
)
_FSDP_OFFLOAD = Flags("--torch-fsdp2-cpu-offload")
_SAME_LOSS = {
    name: NoCounterpart("the same numbers by other kernels, or by another division: the program's own flags say how")
    for name in (
        "axolotl.integrations.liger.ligerplugin",
        "axolotl.integrations.cut_cross_entropy.cutcrossentropyplugin",
        "axolotl.integrations.kernels.kernelsplugin",
        "axolotl.integrations.expert_parallel.expertparallelplugin",
        "axolotl.integrations.context_parallel.contextparallelplugin",
        "axolotl.integrations.lm_eval.lmevalplugin",
        "axolotl.integrations.swanlab.swanlabplugin",
    )
}
_MODEL_SWITCH = only_off("the model is what config.json and the weights of the folder say")
_OTHER_OPTIMIZER = Default("an optimizer that is not here reads it")
_TOO_LONG = Refused("megatron-ext preprocess leaves out what is too long: write drop")
_LAST = only_off("a run ends after --train-iters, with its last weights")
_ITS_OWN = NoCounterpart("validation has the micro batch and the length of training")
_TASKS = {  # of `datasets`, what megatron-ext preprocess does, by key and value in lower case
    "roles_to_train": "['assistant']",
    "train_on_eos": "turn",
    "train_on_eot": "turn",
    "message_field_role": "role",
    "message_field_content": "content",
}


def _split(share: Any) -> str:
    """Return the shares of --split where a share of the samples validates.

    Raises:
        ValueError: it is no share, as a number of samples.
    """
    if isinstance(share, bool) or not 0 <= float(share) < 1:
        raise ValueError
    held_out = round(100 * float(share), 6)
    return f"{100 - held_out:g},{held_out:g},0"


TABLE: Table = {
    "base_model": Flags("--load-hf {} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {}"),
    "model_type": Default("config.json of the --load-hf folder says it"),
    "tokenizer_type": Default("tokenizer.json of the --load-hf folder says it"),
    **{f"datasets.*.{name}": _TEXT for name in ("path", "type", "split", "data_files", "ds_type", "name")},
    **{f"datasets.*.{name}": _TEXT for name in ("field", "field_messages", "chat_template")},
    **{f"datasets.*.{name}": Cases({value: OFF}, _SAMPLES) for name, value in _TASKS.items()},
    **each_of("trust_remote_code preprocess_shards input_format", _FEEDING, "datasets.*."),
    "datasets.*": _SAMPLES,
    **each_of("path split text_column data_files", _TEXT, "pretraining_dataset.*."),
    "pretraining_dataset.*.type": Cases({"pretrain": _TEXT, "completion": _TEXT}, _SAMPLES),
    **each_of("trust_remote_code ds_type", _FEEDING, "pretraining_dataset.*."),
    "pretraining_dataset.*.skip": only_off("megatron-ext preprocess takes all documents: leave them out of the files"),
    "pretraining_dataset.*": _SAMPLES,
    "pretraining_dataset": _TEXT,
    "test_datasets.*": Refused("preprocess these data too, and name them by --valid-data-path"),
    "chat_template": _TEXT,
    "train_on_inputs": Cases({"false": OFF}, _TEXT),
    "dataset_prepared_path": Flags("--data-cache-path {}"),
    "val_set_size": Flags("--split {}", _split),
    "tensor_parallel_size": Fact("tensor"),
    **each_of("context_parallel_size sequence_parallel_degree context_parallel.size", above_one(Fact("context"))),
    "context_parallel.*": SAME_NUMBERS,
    "expert_parallel_size": above_one(Flags("--expert-model-parallel-size {}")),
    "expert_parallel_*": NoCounterpart("--moe-token-dispatcher-type says how tokens get to their experts"),
    "dp_shard_size": Fact("shard"),
    "dp_replicate_size": Fact("replicate"),
    "fsdp_version": FSDP_VERSION,
    "fsdp": Each(
        Cases(
            {"full_shard": FULL_SHARD, "shard_grad_op": SHARD_GRAD, "auto_wrap": OFF, "offload": _FSDP_OFFLOAD},
            Refused("not a strategy that this tool knows; write full_shard"),
        )
    ),
    "fsdp_final_state_dict_type": CHECKPOINTS,
    "deepspeed": NoCounterpart("import that file too: --from deepspeed"),
    "ddp": Default("data parallelism is what ranks do without a flag"),
    "ddp_timeout": Flags("--distributed-timeout-minutes {}", lambda seconds: float(seconds) / 60),
    "distributed_backend": Flags("--distributed-backend {}"),
    "sequence_len": Flags("--seq-length {}"),
    "sample_packing": switch("--reset-position-ids --reset-attention-mask --eod-mask-loss"),
    "pad_to_sequence_len": Default("every sample has --seq-length tokens"),
    "micro_batch_size": Fact("micro_batch_size"),
    "gradient_accumulation_steps": Fact("accumulation"),
    "num_epochs": EPOCHS,
    "max_steps": Flags("--train-iters {}"),
    "optimizer": optimizers("axolotl"),
    "learning_rate": Flags("--lr {}", float),
    "lr_scheduler": Cases(
        {
            "cosine": Flags("--lr-decay-style cosine"),
            "linear": Flags("--lr-decay-style linear"),
            "constant": Flags("--lr-decay-style constant"),
            "constant_with_warmup": Flags("--lr-decay-style constant"),
            "inverse_sqrt": Flags("--lr-decay-style inverse-square-root"),
        },
        Refused("the curves are constant, linear, cosine, inverse-square-root, WSD and power: --lr-decay-style"),
    ),
    "cosine_min_lr_ratio": Depends(
        "lr_scheduler",
        {"cosine": Combined("--min-lr {}", ("learning_rate",))},
        Default("lr_scheduler: cosine alone reads it"),
    ),
    "cosine_constant_lr_ratio": only_off("a cosine ends with the run: --lr-decay-iters ends it earlier"),
    "embedding_lr": Flags("--decoupled-lr {}"),
    "embedding_lr_scale": Combined("--decoupled-lr {}", ("learning_rate",)),
    **each_of("lr_quadratic_warmup jagged_restart_*", only_off("the warmup is linear, and there is one")),
    "lr_scheduler_kwargs*": only_off("the curve's own flags say how it runs"),
    "lr_div_factor": Default("a schedule that has no counterpart reads it"),
    "lr_groups*": Refused("--lr-group PATTERN=FACTOR multiplies rates, by Megatron's names of weights"),
    "warmup_steps": Flags("--lr-warmup-iters {}"),
    "warmup_ratio": Flags("--lr-warmup-fraction {}"),
    "weight_decay": Flags("--weight-decay {}"),
    "adam_beta1": OfOptimizer("betas", 0),
    "adam_beta2": OfOptimizer("betas", 1),
    "adam_epsilon": OfOptimizer("eps"),
    **each_of("adam_beta3 adam_epsilon2 dion_* qgalore_* torchdistx_path", _OTHER_OPTIMIZER),
    **each_of("optim_args* optim_target_modules", only_off("--help-all names the flags of each optimizer")),
    "max_grad_norm": Flags("--clip-grad {}"),
    "seed": Flags("--seed {}"),
    **each_of("bf16 bfloat16", _PRECISION),
    "float16": switch("--fp16"),
    "float32": Default("fp32, as without a flag"),
    "fp16": switch("--fp16"),
    "tf32": Cases({"true": Flags("--tf32"), **dict.fromkeys(("false", "auto"), OFF)}, NEITHER),
    "fp8": switch("--bf16 --fp8-format hybrid"),
    **each_of("fp8_*", Depends("fp8", {"true": Refused("the recipe is --fp8-recipe; leave it out of the file")}, OFF)),
    **each_of("fp32_norms fp32_norm_classes", only_off("norms compute in fp32, and keep weights in the model's type")),
    **each_of(
        "flash_attention sdp_attention xformers_attention flex_attention flex_attn_compile_kwargs* eager_attention "
        "attn_implementation flash_attn_* flash_optimum gemma4_hybrid_attn_impl large_head_attention sdpa_varlen "
        "fused_attn_kernel experts_implementation expert_backend use_kernels chunked_cross_entropy* tiled_mlp* "
        "llama4_linearized_experts heads_k_stride ring_attn_func fa_varlen_kwargs_in_collator",
        _KERNELS,
    ),
    **each_of("sage_attention s2_attention scaling_softmax*", only_off("attention is exact, over all before")),
    "gradient_checkpointing": Cases(
        {
            **dict.fromkeys(("true", "offload", "offload_disk"), Flags(FULL_RECOMPUTE.format(1))),
            **dict.fromkeys(("false", "null"), OFF),
        },
        NEITHER,
    ),
    **each_of(
        "gradient_checkpointing_kwargs* selective_checkpointing* activation_offloading layer_offloading max_memory* "
        "gpu_memory_limit low_cpu_mem_usage gc_steps gc_collect_steps torch_empty_cache_steps ple_cpu_offload "
        "experimental_skip_move_to_device device device_map local_rank",
        _MEMORY,
    ),
    "torch_compile": Cases({"true": Flags("--torch-compile"), **dict.fromkeys(("false", "auto"), OFF)}, NEITHER),
    **each_of("torch_compile_* deepcompile", NoCounterpart("--torch-compile compiles the layers, in its own mode")),
    **each_of(
        "adapter load_in_8bit load_in_4bit gptq relora use_onebitllms model_quantization_config* quantize_moe_experts",
        _ADAPTER,
    ),
    **each_of(
        "lora_*_kernel lora_* peft* qlora_* loraplus_* relora_* mixlora_* bnb_config_kwargs* merge_lora merge_method "
        "nf4_backend nvfp4_*",
        _WITH_ADAPTER,
    ),
    **each_of("rl reward_model process_reward_model trainer_cls* num_labels", _OTHER_LOSS),
    **each_of(
        "trl.* vllm.* ebft.* dpo_* orpo_alpha simpo_gamma cpo_alpha kto_* rl_beta rpo_alpha precompute_ref_log_probs "
        "center_rewards_coefficient max_prompt_len",
        _WITH_RL,
    ),
    **each_of(
        "diffusion_lm* use_eaft use_dft balance_labels neftune_noise_alpha noisy_embedding_alpha use_pose", _OTHER_LOSS
    ),
    **each_of("eaft_* label_balance_* pose_*", Default("a loss that is not here reads it")),
    "plugins": Each(Cases(_SAME_LOSS, Refused("this plugin has no counterpart"))),
    **each_of(
        "liger_* cut_cross_entropy* kd_* hatchery.* coreweave.* dense_mixer diffusion.* diffusion_decision.* "
        "grokfast_* llmcompressor.* recipe save_compressed lm_eval_* mora.* nemo_gym_* spectrum_* moe_* autotune_* "
        "use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels dsv4_* gemma4_* nonexpert_quantization",
        _PLUGIN,
    ),
    **each_of("qat.*", Refused("weights are trained in --bf16, --fp16 or fp32")),
    **each_of("quantization.* export.*", NoCounterpart("what is made of the trained weights later")),
    "unfrozen_parameters": Refused("every weight is trained"),
    "freeze_mm_modules": NoCounterpart("the model has no vision or audio"),
    **each_of("lisa_*", only_off("every weight is trained in every step")),
    **each_of("reinit_weights embeddings_skip_upcast", _MODEL_SWITCH),
    **each_of(
        "base_model_config cls_model_config overrides_of_model_* rope_scaling* resize_token_embeddings_to_32x "
        "shrink_embeddings",
        _MODEL,
    ),
    **each_of(
        "type_of_model revision_of_model is_*_derived_model trust_remote_code tokenizer_use_fast tokenizer_legacy "
        "tokenizer_save_jinja_files processor_* image_* mean_resizing_embeddings",
        Default("the folder of base_model says what it is"),
    ),
    "special_tokens.pad_token": Default("nothing is padded"),
    **each_of(
        "special_tokens.* tokens added_tokens_overrides* eot_tokens tokenizer_config tokenizer_use_mistral_common "
        "fix_untrained_tokens",
        _TOKENIZER,
    ),
    "chat_template_jinja": Refused("write it into a file, and give its path as chat_template"),
    **each_of("chat_template_kwargs* default_system_message role_boundaries.*", _SAMPLES),
    **each_of(
        "group_by_length sample_packing_* eval_sample_packing pad_to_multiple_of multipack_real_batches "
        "batch_flattening pretrain_multipack_* pretraining_sample_concatenation streaming "
        "streaming_multipack_buffer_size max_packed_* dataset_processes dataset_num_proc dataset_keep_in_memory "
        "skip_prepare_dataset num_dataset_shards_to_save "
        "dataloader_drop_last accelerator_config* remove_unused_columns is_preprocess preprocess_iterable "
        "total_num_tokens total_supervised_tokens axolotl_config_path strict evaluation_strategy ddp_*",
        _FEEDING,
    ),
    "excess_length_strategy": Cases({"drop": OFF}, _TOO_LONG),
    **each_of(
        "dataset_exact_deduplication shuffle_before_merging_datasets curriculum_sampling min_sample_len "
        "dataset_shard_num dataset_shard_idx",
        only_off("megatron-ext preprocess has no such step: change the data before"),
    ),
    "shuffle_merged_datasets": Cases({"true": OFF}, Refused("samples are drawn in an order by --seed")),
    "batch_size": Refused("write micro_batch_size and gradient_accumulation_steps"),
    "auto_find_batch_size": only_off("the batch is what the file says"),
    "world_size": Fact("world_size"),
    **each_of("eval_batch_size eval_sequence_len", _ITS_OWN),
    **each_of("early_stopping_patience load_best_model_at_end", _LAST),
    "full_determinism": switch("--deterministic-mode"),
    **each_of(
        "evals_per_epoch saves_per_epoch eval_strategy eval_on_start save_first_step save_only_model save_safetensors "
        "dynamic_checkpoint.* auto_resume_from_checkpoints metric_for_best_model greater_is_better loss_watchdog_*",
        _WHEN,
    ),
    **each_of(
        "use_wandb wandb_* use_mlflow mlflow_* hf_mlflow_* use_comet comet_* use_trackio trackio_* use_otel_metrics "
        "otel_* gradio_* use_ray ray_* resources_per_worker* hub_* push_dataset_to_hub hf_use_auth_token "
        "use_tensorboard logging_nan_inf_filter profiler_* sync_profiler_* include_* generat* num_generation_samples "
        "do_bench_eval bench_* do_causal_lm_eval eval_*",
        _TRACKERS,
    ),
    "dataloader_num_workers": Flags("--num-workers {}"),
    "dataloader_pin_memory": Default("batches for a GPU are pinned"),
    "dataloader_prefetch_factor": NoCounterpart("the background threads read ahead as far as there are threads"),
    "output_dir": Flags("--save {}"),
    "logging_steps": Flags("--log-interval {}"),
    "save_strategy": Default("--save-interval counts steps"),
    "save_steps": Flags("--save-interval {}"),
    "save_total_limit": Flags("--keep-last-checkpoints {}"),
    "resume_from_checkpoint": RESUMED,
    "eval_steps": Flags("--eval-interval {}"),
    "wandb_project": Flags("--wandb-project {}"),
    "wandb_entity": Flags("--wandb-entity {}"),
    "wandb_name": Flags("--wandb-exp-name {}"),
    **FSDP,
}

DEFAULTS = {"lr_scheduler": ("learning_rate", "cosine"), "weight_decay": ("learning_rate", 0)}
"""Keys, each with another next to which leaving it out means a value that is not our default."""

IMPLIED = {"base_model": "the folder must be there: download the model into it first"}
# transformers' Trainer takes the steps where both are given.
SHADOWED = {"warmup_ratio": "warmup_steps"}
DEFAULT_ACCUMULATION = 1


FORMATS = {"alpaca": "alpaca", "chat_template": "messages", "sharegpt": "sharegpt", "completion": "completion"}
"""Our --data-format by the part of Axolotl's `type` before a dot or colon."""
_TEMPLATES = {
    "tokenizer_default": "tokenizer",
    "alpaca": "alpaca",
    "chatml": "chatml",
    "llama3": "llama3",
    "zephyr": "zephyr",
}
_COLUMNS = {
    "messages": ("field_messages", "messages"),
    "completion": ("field", "text"),
    "text": ("text_column", "text"),
}
_FOLDER = "data"


@dataclass(frozen=True)
class PreparedData:
    """Says what becomes of the keys of the data."""

    commands: tuple[str, ...] = ()
    """Command lines that make the .bin/.idx files."""
    flags: str = ""
    """Flags that train on them."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Key -> reason to report for it; other keys have the meaning in the table."""
    became: Mapping[str, str] = field(default_factory=dict)
    """Key -> one of `translate.KINDS`, where it is not data."""


_READ = ("path", "type", "split", "data_files", "field_messages", "field", "chat_template", "ds_type", "text_column")
_NO_FORMAT = f"the formats are {', '.join(FORMATS)}: write the records as messages"
_SUBSET = "which files of a repository it means does not stand here: name them by data_files"


def prepare(content: Mapping[str, Any]) -> PreparedData:
    """Return the commands and flags for `datasets:`, or else for `pretraining_dataset:`; nothing where a file has none,
    or none that can be read."""
    source = "datasets" if content.get("datasets") else "pretraining_dataset"
    datasets = content.get(source)
    if isinstance(datasets, str):
        datasets = [{"path": datasets}]
    if not isinstance(datasets, list) or not all(isinstance(one, Mapping) for one in datasets):
        return PreparedData()
    commands, prefixes, reasons, became = [], [], {source: "see the commands below"}, {}
    for number, one in enumerate(datasets):
        form = _form(one, source)
        key = f"{source}.{number}"
        reasons |= {f"{key}.{name}": "see the commands below" for name in one if name in _READ}
        if form is None or "path" not in one:
            reasons |= {f"{key}.type": _NO_FORMAT, f"{key}.path": _NO_FORMAT}
            became |= dict.fromkeys((name for name in reasons if name.startswith(f"{key}.")), "none")
            became[f"{key}.type" if "type" in one else f"{key}.path"] = "refused"
            continue
        if one.get("name") and "data_files" not in one:
            reasons[f"{key}.name"], became[f"{key}.name"] = _SUBSET, "refused"
        name = "train" if len(datasets) == 1 else f"train-{number}"
        commands.append(_command(one, form, name, content))
        prefixes.append(f"{_FOLDER}/{name}_{one.get('text_column', 'text') if form == 'text' else form}_document")
    if not commands:
        return PreparedData(reasons=reasons, became=became)
    for name in ("chat_template", "train_on_inputs"):
        if name in content:
            reasons[name] = "see the commands below"
    everything = source == "pretraining_dataset" or content.get("train_on_inputs")
    flags = f"--data-path {' '.join(prefixes)}" + ("" if everything else " --assistant-only-loss")
    return PreparedData(tuple(commands), flags, reasons, became)


def _form(one: Mapping[str, Any], source: str) -> str | None:
    """Return the --data-format of a dataset; None for a type that has none."""
    kind = str(one.get("type", "")).replace(":", ".").split(".")[0]
    if source == "pretraining_dataset":
        return "text" if kind in ("", "pretrain", "completion") else None
    return FORMATS.get(kind)


def _command(one: Mapping[str, Any], form: str, name: str, content: Mapping[str, Any]) -> str:
    words = ["megatron-ext", "preprocess", "--input", *_inputs(one), "--output-prefix", f"{_FOLDER}/{name}"]
    words += [] if form == "text" else ["--data-format", form]
    column, default = _COLUMNS.get(form, ("", ""))
    if one.get(column, default) != default:
        words += ["--json-keys", str(one[column])]
    template = one.get("chat_template", content.get("chat_template"))
    # The type `alpaca` has one prompt, whatever the template; alpaca_chat and the others go through it.
    if form in ("messages", "sharegpt") and template is not None:
        words += ["--chat-template", _TEMPLATES.get(str(template), str(template))]
    if form in ("completion", "text"):
        words.append("--append-eod")
    if form != "text" and content.get("sample_packing") and content.get("sequence_len"):
        words += ["--seq-length", str(content["sequence_len"]), "--on-error", "skip"]
    if form != "text" and content.get("train_on_inputs"):
        words.append("--train-on-inputs")
    if content.get("base_model"):
        words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(content["base_model"])]
    return shlex.join(words)


def _inputs(one: Mapping[str, Any]) -> list[str]:
    """Return --input: files and folders as they are, a repository's as URLs."""
    path = str(one["path"])
    files = one.get("data_files")
    names = [str(file) for file in (files if isinstance(files, list) else [files] if files else [])]
    if path in ("json", "parquet", "arrow", "text") and names:
        return names
    if "://" in path or path.startswith((".", "/", "~")) or path.count("/") != 1 or "." in path.rsplit("/", 1)[-1]:
        return [path]
    if names:
        return [f"hf://datasets/{path}/{file}" for file in names]
    return [f"hf://datasets/{path}/**/{one.get('split', 'train')}*"]
