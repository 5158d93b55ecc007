"""Translates Megatron-Bridge's `run_config.yaml`, as its version 0.3 writes it next to every checkpoint.

Most of its names are Megatron's, and so ours; a value `{_target_: torch.bfloat16, _call_: false}` is read as its name.
"""

from collections.abc import Mapping
from typing import Any

from megatron_ext.plugins.migrate.key_meanings import (
    NEITHER,
    OFF,
    SHOWN,
    TEXT_BEFORE,
    WITHOUT_TRANSFORMER_ENGINE,
    Cases,
    Default,
    Depends,
    Fact,
    Flags,
    Meaning,
    NoCounterpart,
    Refused,
    Table,
    above_one,
    each_of,
    only,
    only_off,
    same_flag,
    same_flags,
    switch,
)

_KERNELS = NoCounterpart("the program chooses its own kernels, which changes numbers by rounding alone")
_TRAFFIC = NoCounterpart("how ranks exchange tensors changes no number")
_MEMORY = NoCounterpart("what is kept in which memory changes no number")
_RECOVERY = NoCounterpart("what restarts and watches a run changes nothing of the training: docs/faults.md")
_SAVING = NoCounterpart("how a checkpoint is written changes nothing of what it holds; --load reads it in any layout")
_ITS_OWN = Default("`model` has it, from where it is read")
_PRECISION = Default("`mixed_precision` or `model` says it")
_NO_EXPERTS = {"null": Default("the model has no experts")}
_NOT_HERE = "no layer here does it: leave it out"
_PRECISIONS = Cases(
    {
        "bf16_mixed": Flags("--bf16"),
        "bf16": Flags("--bf16"),
        "fp16_mixed": Flags("--fp16"),
        "fp32": OFF,
    },
    Refused("of its recipes bf16_mixed, fp16_mixed and fp32 are read: write one, and give --fp8-format and its flags"),
)
_FP8 = Cases(
    {"hybrid": Flags("--fp8-format hybrid"), "e4m3": Flags("--fp8-format e4m3")}, Refused("write hybrid or e4m3")
)
_OPTIMIZERS = Cases(
    {
        "adam": Flags("--optimizer adam"),
        "sgd": Flags("--optimizer sgd"),
        "muon": Flags("--optimizer muon"),
        "dist_muon": Flags("--optimizer muon"),
    },
    Refused("of its optimizers adam, sgd and muon are read"),
)

_LISTS = ("moe_layer_freq", "linear_attention_freq", "no_rope_freq", "window_attn_skip_freq", "window_size")
"""Keys of `model` whose lists are one word of a command line here."""


def normalized(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the file with names in the place of objects, with lists of layers as one word, and the data of a blend as
    --data-path has them."""
    plain = {name: _plain(value) for name, value in content.items()}
    model, data = plain.get("model"), plain.get("dataset")
    if isinstance(model, Mapping):
        plain["model"] = {name: _word(name, value) for name, value in model.items()}
    if isinstance(data, Mapping):
        blends = data.get("blend_per_split")
        split = blends
        if isinstance(blends, list) and len(blends) == len(_SPLITS):
            split = {name: _paths(one) for name, one in zip(_SPLITS, blends, strict=True)}
        plain["dataset"] = {
            name: split if name == "blend_per_split" else _paths(value) if name == "blend" else value
            for name, value in data.items()
        }
    return plain


_SPLITS = ("train", "valid", "test")


def _plain(value: Any) -> Any:
    """Return the name of an object, or the number of an enumeration's value, and everything else with those in it."""
    if isinstance(value, Mapping):
        if value.keys() >= {"_target_", "_call_"}:
            arguments = value.get("_args_")
            return arguments[0] if isinstance(arguments, list) and len(arguments) == 1 else value["_target_"]
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _word(name: str, value: Any) -> Any:
    if name not in _LISTS or not isinstance(value, list):
        return value
    numbers = ",".join(str(one) for one in value)
    return numbers if name == "window_size" else f"[{numbers}]"


def _paths(blend: Any) -> Any:
    """Return [weight, path, ...] for [[path, ...], [weight, ...]]; anything else as it is."""
    if not (isinstance(blend, list) and len(blend) == 2 and isinstance(blend[0], list)):
        return blend
    paths, weights = blend
    if not (isinstance(weights, list) and len(weights) == len(paths)):
        return list(paths)
    return [word for pair in zip(weights, paths, strict=True) for word in pair]


def _with_experts(names: str) -> dict[str, Meaning]:
    return {f"model.{name}": Depends("model.num_moe_experts", _NO_EXPERTS, same_flag(name)) for name in names.split()}


def _where(key: str, value: str, names: str, prefix: str) -> dict[str, Meaning]:
    """Return our flags of the same name where another key has a value, and nothing to write elsewhere."""
    unread = Default(f"{key}: {value} alone has it read")
    return {f"{prefix}{name}": Depends(key, {value: Flags(_flag(name))}, unread) for name in names.split()}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')} {{}}"


_MODEL: dict[str, Meaning] = {
    **{
        f"model.{name}_model_parallel_size": Fact(fact)
        for name, fact in (("tensor", "tensor"), ("pipeline", "pipeline"))
    },
    "model.context_parallel_size": above_one(Fact("context")),
    "model.virtual_pipeline_model_parallel_size": Flags("--num-virtual-stages-per-pipeline-rank {}"),
    "model.num_layers_in_first_pipeline_stage": Flags("--decoder-first-pipeline-num-layers {}"),
    "model.num_layers_in_last_pipeline_stage": Flags("--decoder-last-pipeline-num-layers {}"),
    "model.microbatch_group_size_per_vp_stage": NoCounterpart("the order of a pipeline's passes changes no number"),
    "model.layernorm_epsilon": Flags("--norm-epsilon {}"),
    "model.layernorm_zero_centered_gamma": switch("--apply-layernorm-1p"),
    "model.add_bias_linear": Cases({"true": OFF, "false": Flags("--disable-bias-linear")}, NEITHER),
    "model.gated_linear_unit": Default("activation_func says which gate"),
    "model.activation_func": Depends(
        "model.gated_linear_unit",
        {
            "true": Cases(
                {"torch.nn.functional.silu": Flags("--swiglu"), "torch.nn.functional.gelu": Flags("--geglu")},
                Refused("of gated activations silu and gelu are read"),
            )
        },
        Cases(
            {
                "torch._c._nn.gelu": OFF,
                "torch.nn.functional.gelu": OFF,
                "megatron.core.activations.squared_relu": Flags("--squared-relu"),
            },
            Refused("of activations gelu and squared_relu are read"),
        ),
    ),
    "model.num_moe_experts": Flags("--num-experts {}"),
    "model.share_embeddings_and_output_weights": Cases(
        {"true": OFF, "false": Flags("--untie-embeddings-and-output-weights")}, NEITHER
    ),
    "model.num_query_groups": Flags("--group-query-attention --num-query-groups {}"),
    "model.rope_scaling": switch("--use-rope-scaling"),
    **_where("model.rope_scaling", "true", "rope_scaling_factor", "model."),
    "model.seq_len_interpolation_factor": Flags("--rotary-seq-len-interpolation-factor {}"),
    "model.rotary_scaling_factor": only_off("give --rope-type yarn and its flags"),
    "model.fp8": _FP8,
    **{
        f"model.{name}": Depends("model.fp8", {"null": OFF}, Flags(_flag(name)))
        for name in ("fp8_recipe", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    },
    "model.first_last_layers_bf16": switch("--first-last-layers-bf16"),
    **_with_experts(
        "moe_shared_expert_intermediate_size moe_shared_expert_gate moe_layer_freq moe_ffn_hidden_size "
        "moe_router_load_balancing_type moe_router_topk moe_router_num_groups moe_router_group_topk "
        "moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_score_function moe_router_dtype "
        "moe_router_enable_expert_bias moe_router_bias_update_rate moe_router_force_load_balancing moe_grouped_gemm "
        "moe_aux_loss_coeff moe_z_loss_coeff moe_input_jitter_eps moe_expert_capacity_factor moe_token_drop_policy "
        "moe_layer_recompute moe_apply_probs_on_input moe_latent_size expert_tensor_parallel_size"
    ),
    **each_of(
        "moe_token_dropping moe_router_topk_limited_devices moe_enable_routing_replay", only_off(_NOT_HERE), "model."
    ),
    **each_of(
        "moe_*", NoCounterpart("how tokens get to their experts, and what is fused, changes no number"), "model."
    ),
    **same_flags(
        "sequence_parallel expert_model_parallel_size deterministic_mode num_layers mtp_num_layers "
        "mtp_loss_scaling_factor mtp_use_repeated_layer pipeline_model_parallel_layout "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split hidden_size num_attention_heads "
        "softmax_scale softmax_type ffn_hidden_size "
        "kv_channels add_qkv_bias glu_linear_offset activation_func_clamp_value "
        "rotary_interleaved window_size window_attn_skip_freq normalization qk_layernorm qk_l2_norm qk_clip "
        "qk_clip_alpha qk_clip_threshold log_max_attention_logit attention_output_gate multi_latent_attention "
        "no_rope_freq experimental_attention_variant dsa_indexer_n_heads dsa_indexer_head_dim dsa_indexer_topk "
        "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss linear_attention_freq linear_conv_kernel_dim "
        "linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads init_method_std "
        "embedding_init_method_std recompute_granularity recompute_method recompute_num_layers recompute_modules "
        "cp_comm_type mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads make_vocab_size_divisible_by "
        "position_embedding_type rotary_base rotary_percent seq_length vocab_size bf16 fp16",
        "model.",
    ),
    # Their defaults are not the flags', whose own are 0.1.
    "model.hidden_dropout": Flags("--hidden-dropout {}"),
    "model.attention_dropout": Flags("--attention-dropout {}"),
    **only(
        "hybrid_context_parallel fp32_residual_connection apply_residual_connection_post_layernorm "
        "calculate_per_token_loss apply_query_key_layer_scaling heterogeneous_block_specs quant_recipe mrope_section "
        "use_kitchen is_hybrid_model fp4 moe_extended_tp test_mode enable_autocast mtp_standalone batch_invariant_mode "
        "restore_modelopt_state hierarchical_context_parallel_sizes max_seqlen_per_dp_cp_rank fp16_lm_cross_entropy",
        _NOT_HERE,
        "model.",
    ),
    **each_of(
        "init_method output_layer_init_method embedding_init_method", only_off("give --init-method-std"), "model."
    ),
    "model.attention_softmax_in_fp32": Default("scores are summed in fp32"),
    **each_of("params_dtype pipeline_dtype autocast_dtype", _PRECISION, "model."),
    "model.transformer_layer_spec*": WITHOUT_TRANSFORMER_ENGINE,
    **each_of("transformer_impl use_te_* use_transformer_engine_* fp8_*", WITHOUT_TRANSFORMER_ENGINE, "model."),
    **each_of(
        "attention_backend *_fusion *fusion_impl persist_layer_norm memory_efficient_layer_norm flash_decode "
        "use_fused_weighted_squared_relu fused_single_qkv_rope kitchen_* fp4_* cuda_graph* external_cuda_graph "
        "enable_cuda_graph disable_* use_kitchen_attention tp_only_amax_red activation_func_fp8_input_store "
        "use_mamba_mem_eff_path mlp_chunks_for_prefill inference_* use_inference_* symmetric_ar_type",
        _KERNELS,
        "model.",
    ),
    **each_of(
        "tp_comm_* *p2p* async_tensor_model_parallel_allreduce overlap_* delay_wgrad_compute ep_overlap_* "
        "pipeline_model_parallel_comm_backend defer_embedding_wgrad_compute wgrad_deferral_limit variable_seq_lengths "
        "scatter_embedding_sequence_parallel clone_scatter_output_in_embedding distribute_saved_activations "
        "gradient_accumulation_fusion",
        _TRAFFIC,
        "model.",
    ),
    **each_of(
        "cpu_offloading* _cpu_offloading_context deallocate_pipeline_outputs fine_grained_activation_offloading "
        "offload_modules* min_offloaded_tensor_size num_microbatches_with_partial_activation_checkpoints "
        "use_cpu_initialization init_model_with_meta_device perform_initialization",
        _MEMORY,
        "model.",
    ),
    **each_of(
        "timers *_func config_logger_dir barrier_with_L1_time parallel_output hf_model_id should_pad_vocab mtp_enabled "
        "use_te_rng_tracker use_arbitrary_attention_mask _pg_collection* hetereogenous_dist_checkpoint "
        "generation_config* bias_* masked_softmax_fusion",
        SHOWN,
        "model.",
    ),
}

_TRAINING: dict[str, Meaning] = {
    "train.micro_batch_size": Fact("micro_batch_size"),
    "train.global_batch_size": Fact("global_batch_size"),
    **same_flags(
        "rampup_batch_size check_weight_hash_across_dp_replicas_interval train_iters train_samples exit_interval "
        "exit_duration_in_mins exit_signal_handler manual_gc manual_gc_interval eval_iters eval_interval skip_train",
        "train.",
    ),
    "train.iterations_to_skip": only_off("--skip-samples leaves out samples, by their numbers"),
    "train.decrease_batch_size_if_needed": only_off("a batch is divided over all ranks"),
    **each_of(
        "empty_unused_memory_level train_sync_interval exit_signal exit_signal_handler_for_dataloader manual_gc_eval",
        SHOWN,
        "train.",
    ),
    "rng.seed": same_flag("seed"),
    "rng.data_parallel_random_init": only_off("weights begin equal on all data-parallel ranks"),
    **each_of(
        "te_rng_tracker inference_rng_tracker",
        _KERNELS,
        "rng.",
    ),
    "rerun_state_machine.*": NoCounterpart("a NaN ends the run, and --spike-threshold names losses that leap"),
    **same_flags(
        "lr min_lr decoupled_lr decoupled_min_lr weight_decay apply_wd_to_qk_layernorm loss_scale initial_loss_scale "
        "min_loss_scale loss_scale_window hysteresis adam_beta1 adam_beta2 adam_eps clip_grad optimizer_cpu_offload "
        "log_num_zeros_in_grad use_distributed_optimizer",
        "optimizer.",
    ),
    "optimizer.optimizer": _OPTIMIZERS,
    **_where("optimizer.optimizer", "sgd", "sgd_momentum", "optimizer."),
    **_where(
        "optimizer.optimizer",
        "muon",
        "muon_momentum muon_scale_mode muon_fp32_matmul_prec muon_num_ns_steps muon_tp_mode muon_extra_scale_factor",
        "optimizer.",
    ),
    "optimizer.muon_use_nesterov": switch("--muon-nesterov"),
    "optimizer.muon_split_qkv": Cases({"true": OFF, "false": Flags("--muon-no-split-qkv")}, NEITHER),
    **_where("optimizer.optimizer_cpu_offload", "true", "optimizer_offload_fraction", "optimizer."),
    "optimizer.decoupled_weight_decay": Cases({"true": OFF}, Refused("--optimizer adam is AdamW")),
    "optimizer.use_precision_aware_optimizer": only_off("give --exp-avg-dtype, --exp-avg-sq-dtype"),
    **each_of("bf16 fp16 fp8_recipe *_dtype", _PRECISION, "optimizer."),
    **each_of(
        "reuse_grad_buf_for_mxfp8_param_ag store_param_remainders overlap_param_gather "
        "overlap_param_gather_with_optimizer_step use_torch_optimizer_for_cpu_offload "
        "overlap_cpu_optimizer_d2h_h2d pin_cpu_grads pin_cpu_params barrier_with_L1_time timers "
        "config_logger_dir",
        _MEMORY,
        "optimizer.",
    ),
    "optimizer_config_override_provider.*": Refused("a class of one's own changes the optimizer"),
    **same_flags(
        "overlap_grad_reduce overlap_param_gather use_distributed_optimizer num_distributed_optimizer_instances "
        "check_for_large_grads use_megatron_fsdp",
        "ddp.",
    ),
    **_where("ddp.use_megatron_fsdp", "true", "data_parallel_sharding_strategy outer_dp_sharding_strategy", "ddp."),
    "ddp.grad_reduce_in_fp32": switch("--accumulate-allreduce-grads-in-fp32"),
    "ddp.*": _TRAFFIC,
    **same_flags(
        "lr_decay_style lr_wsd_decay_style lr_decay_iters lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples "
        "lr_warmup_fraction lr_warmup_iters lr_warmup_samples lr_warmup_init override_opt_param_scheduler "
        "use_checkpoint_opt_param_scheduler weight_decay_incr_style",
        "scheduler.",
    ),
    # With a constant decay, a recipe's ends of it are read there all the same.
    "scheduler.start_weight_decay": Flags("--weight-decay-incr-style linear --start-weight-decay {}"),
    "scheduler.end_weight_decay": Flags("--end-weight-decay {}"),
    "scheduler.no_weight_decay_cond_type": only_off("give --weight-decay-group"),
    **each_of(
        "lr_warmup_steps lr_decay_steps wd_incr_steps wsd_decay_steps",
        Default("it follows from the numbers of iterations or samples"),
        "scheduler.",
    ),
}

_AROUND: dict[str, Meaning] = {
    **same_flags("num_workers split reset_position_ids reset_attention_mask eod_mask_loss full_validation", "dataset."),
    "dataset.blend": Flags("--data-path {}"),
    **{f"dataset.blend_per_split.{name}": Flags(f"--{name}-data-path {{}}") for name in _SPLITS},
    "dataset.blend_per_split": only_off("write a list of paths and weights for each split"),
    "dataset.path_to_cache": Flags("--data-cache-path {}"),
    "dataset.mock": switch("--mock-data"),
    "dataset.sequence_length": _ITS_OWN,
    "dataset.random_seed": NoCounterpart("samples are drawn by --seed"),
    "dataset.multiple_validation_sets": switch("--multiple-validation-sets"),
    "dataset.*": TEXT_BEFORE,
    **same_flags(
        "vocab_file merge_file tokenizer_type tokenizer_model tiktoken_pattern tiktoken_num_special_tokens",
        "tokenizer.",
    ),
    "tokenizer.vocab_size": _ITS_OWN,
    "tokenizer.vocab_extra_ids": Cases({"0": OFF}, Refused("no ids are added to a vocabulary")),
    **only("special_tokens tiktoken_special_tokens", "give --tokenizer-special-tokens", "tokenizer."),
    "tokenizer.*": Default("the tokenizer's files say it"),
    **same_flags(
        "log_interval log_params_norm log_throughput timing_log_level tensorboard_dir tensorboard_log_interval "
        "wandb_project wandb_exp_name wandb_save_dir wandb_entity mlflow_experiment mlflow_run_name "
        "mlflow_tracking_uri",
        "logger.",
    ),
    "logger.*": SHOWN,
    **same_flags(
        "save save_interval load finetune ckpt_step use_checkpoint_args exit_on_missing_checkpoint ckpt_format "
        "async_save non_persistent_save_interval non_persistent_ckpt_type non_persistent_local_ckpt_dir replication "
        "replication_jump",
        "checkpoint.",
    ),
    "checkpoint.most_recent_k": Cases({"-1": OFF}, Flags("--keep-last-checkpoints {}")),
    **{
        f"checkpoint.{name}": Cases({"true": OFF, "false": Flags(f"--no-{name.replace('_', '-')}")}, NEITHER)
        for name in ("save_optim", "save_rng", "load_optim", "load_rng")
    },
    "checkpoint.fully_parallel_save": switch("--ckpt-fully-parallel-save"),
    "checkpoint.fully_parallel_load": switch("--ckpt-fully-parallel-load"),
    "checkpoint.pretrained_checkpoint": Flags("--finetune --load {}"),
    **each_of(
        "load_main_params_from_ckpt non_persistent_global_ckpt_dir non_persistent_local_ckpt_algo "
        "ckpt_convert_format ckpt_convert_save use_persistent_ckpt_worker ckpt_assume_constant_structure "
        "strict_fsdp_dtensor_load dist_ckpt_strictness dist_ckpt_optim_fully_reshardable "
        "distrib_optim_fully_reshardable_mem_efficient save_tokenizer_assets replication_factor",
        _SAVING,
        "checkpoint.",
    ),
    "dist.distributed_timeout_minutes": same_flag("distributed_timeout_minutes"),
    "dist.use_torch_fsdp2": switch("--use-torch-fsdp2"),
    "dist.use_megatron_fsdp": switch("--use-megatron-fsdp"),
    "dist.*": _TRAFFIC,
    **same_flags(
        "profile_step_start profile_step_end record_memory_history memory_snapshot_path record_shapes nvtx_ranges",
        "profiling.",
    ),
    "profiling.use_pytorch_profiler": switch("--profile --use-pytorch-profiler"),
    "profiling.use_nsys_profiler": switch("--profile"),
    "profiling.*": SHOWN,
    "straggler.log_straggler": switch("--log-straggler"),
    **each_of("ft.* straggler.* nvrx_straggler.* inprocess_restart.*", _RECOVERY),
    "tensor_inspect.*": SHOWN,
    "peft.*": Refused("all weights are trained; adapters are for fine-tuning tools"),
    "comm_overlap.*": _TRAFFIC,
    "mixed_precision": _PRECISIONS,
    "mixed_precision.bf16": switch("--bf16"),
    "mixed_precision.fp16": switch("--fp16"),
    "mixed_precision.fp8": _FP8,
    "mixed_precision.fp8_recipe": Depends("mixed_precision.fp8", {"null": OFF}, Flags("--fp8-recipe {}")),
    "mixed_precision.fp4": only_off("give --fp8-format: nothing is computed in 4 bits"),
    "mixed_precision.grad_reduce_in_fp32": Default("ddp.grad_reduce_in_fp32 says it"),
    "mixed_precision.*": _ITS_OWN,
}

TABLE: Table = {
    **each_of("_target_ *._target_", Default("the class that the other keys belong to")),
    "__version__": SHOWN,
    **_MODEL,
    **_TRAINING,
    **_AROUND,
}

IMPLIED: dict[str, str] = {}
DEFAULTS: dict[str, tuple[str, Any]] = {}
SHADOWED: dict[str, str] = {}
DEFAULT_ACCUMULATION = None
