"""Translates nanotron's YAML file, as its release 0.4 and its repository of 2026 write it (`Config.save_as_yaml`)."""

from operator import add
from typing import Any

from megatron_ext.plugins.migrate.key_meanings import (
    NEITHER,
    NORMS_WITHOUT_DECAY,
    OFF,
    PLAIN_DECODER,
    SHOWN,
    TEXT_BEFORE,
    Cases,
    Combined,
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
    only_off,
    switch,
)

_SERVING = NoCounterpart("the tokenizer's files name such ids; no step of the training reads it")
_KERNELS = NoCounterpart("the program chooses its own kernels, which changes numbers by rounding alone")
_AFTER = NoCounterpart("what is done with a checkpoint changes nothing of the training: megatron-ext tasks evaluates")
_POSITION = only_off("a run goes on by --load, from a checkpoint of ours; weights come by way of Hugging Face")
_EXPERTS = Refused("its experts are not translated: give --num-experts and the flags of docs/experts.md")
_LLAMA = "model.model_config."
_SCHEDULE = "optimizer.learning_rate_scheduler."
_START = f"{_SCHEDULE}lr_decay_starting_step"
_NO_MODEL = Refused("models of this class are not translated: give the model's flags, or --load-hf")


def _starcoder(meaning: str) -> Meaning:
    return Cases({"": OFF}, Refused(f"Starcoder2's {meaning}: give --load-hf with a folder of the model"))


TABLE: Table = {
    "parallelism.dp": Fact("data"),
    "parallelism.pp": Fact("pipeline"),
    "parallelism.tp": Fact("tensor"),
    "parallelism.context_parallel_size": above_one(Fact("context")),
    "parallelism.expert_parallel_size": above_one(Flags("--expert-model-parallel-size {}")),
    "parallelism.pp_engine": NoCounterpart("the schedule is 1F1B; another order of the same passes adds the same sums"),
    "parallelism.tp_mode": Depends(
        "parallelism.tp",
        {"1": OFF},
        Cases({"all_reduce": OFF, "reduce_scatter": Flags("--sequence-parallel")}, Refused("not a mode of nanotron's")),
    ),
    **each_of(
        "tp_linear_async_communication tp_recompute_allgather",
        NoCounterpart("how ranks exchange activations changes no number"),
        "parallelism.",
    ),
    "parallelism.recompute_layer": switch(
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    ),
    "tokens.sequence_length": Flags("--seq-length {}"),
    "tokens.train_steps": Flags("--train-iters {}"),
    "tokens.micro_batch_size": Fact("micro_batch_size"),
    "tokens.batch_accumulation_per_replica": Fact("accumulation"),
    "tokens.val_check_interval": Cases({"-1": Flags("--eval-interval 0")}, Flags("--eval-interval {}")),
    "tokens.limit_val_batches": Flags("--eval-iters {}"),
    "tokens.limit_test_batches": NoCounterpart("a test follows the last step, where there are data for it"),
    "model.dtype": Cases(
        {"bfloat16": Flags("--bf16"), "float16": Flags("--fp16"), "float32": OFF},
        Refused("the precisions are bfloat16, float16 and float32"),
    ),
    "model.make_vocab_size_divisible_by": Flags("--make-vocab-size-divisible-by {}"),
    "model.ddp_bucket_cap_mb": NoCounterpart("--ddp-bucket-size, whose default fits"),
    "model.init_method.std": Flags("--init-method-std {}"),
    "model.init_method.scaling_method": Cases(
        {"num_layers": OFF}, Refused("outputs of layers begin with the deviation over the root of 2 x layers")
    ),
    "model.init_method.use_mup": only_off("spectral muP is not here; --mup-base-hidden-size is the other muP"),
    "model.init_method.path": Refused("weights come by way of Hugging Face: export them there, and give --load-hf"),
    f"{_LLAMA}is_llama_config": Cases({"true": Flags(PLAIN_DECODER)}, _NO_MODEL),
    f"{_LLAMA}is_qwen2_config": Cases({"true": Flags(PLAIN_DECODER)}, _NO_MODEL),
    f"{_LLAMA}is_starcoder2_config": _NO_MODEL,
    f"{_LLAMA}hidden_act": Cases({"silu": Flags("--swiglu"), "gelu": Flags("--geglu")}, Refused("write silu or gelu")),
    f"{_LLAMA}hidden_size": Flags("--hidden-size {}"),
    f"{_LLAMA}intermediate_size": Flags("--ffn-hidden-size {}"),
    f"{_LLAMA}num_hidden_layers": Flags("--num-layers {}"),
    f"{_LLAMA}num_attention_heads": Flags("--num-attention-heads {}"),
    f"{_LLAMA}num_key_value_heads": Flags("--group-query-attention --num-query-groups {}"),
    f"{_LLAMA}rms_norm_eps": Flags("--normalization RMSNorm --norm-epsilon {}"),
    f"{_LLAMA}max_position_embeddings": Flags("--max-position-embeddings {}"),
    f"{_LLAMA}vocab_size": Flags("--vocab-size {}"),
    f"{_LLAMA}tie_word_embeddings": Cases(
        {"true": OFF, "false": Flags("--untie-embeddings-and-output-weights")}, NEITHER
    ),
    f"{_LLAMA}attention_bias": Depends(
        f"{_LLAMA}is_qwen2_config", {"true": switch("--add-qkv-bias")}, switch("--add-qkv-bias --add-output-bias")
    ),
    f"{_LLAMA}rope_theta": Flags("--rotary-base {}"),
    f"{_LLAMA}rope_interleaved": switch("--rotary-interleaved"),
    f"{_LLAMA}rope_seq_len_interpolation_factor": Flags("--rotary-seq-len-interpolation-factor {}"),
    **dict.fromkeys(
        (f"{_LLAMA}rope_scaling.rope_type", f"{_LLAMA}rope_scaling.type"),
        Cases({"llama3": Flags("--use-rope-scaling"), "default": OFF}, Refused("of scaled positions, llama3 is read")),
    ),
    f"{_LLAMA}rope_scaling.factor": Flags("--rope-scaling-factor {}"),
    f"{_LLAMA}rope_scaling.low_freq_factor": Flags("--rope-scaling-low-freq-factor {}"),
    f"{_LLAMA}rope_scaling.high_freq_factor": Flags("--rope-scaling-high-freq-factor {}"),
    f"{_LLAMA}rope_scaling.original_max_position_embeddings": Flags(
        "--rope-scaling-original-max-position-embeddings {}"
    ),
    f"{_LLAMA}rope_scaling": only_off("write the kind of scaling as a mapping"),
    f"{_LLAMA}z_loss_enabled": only_off("the coefficient is --z-loss-strength: leave it out, and give the flag"),
    f"{_LLAMA}z_loss_coefficient": Default("z_loss_enabled alone has it read"),
    f"{_LLAMA}sliding_window_size": only_off("give --window-size LEFT,0"),
    f"{_LLAMA}no_rope_layer": only_off("give --no-rope-freq with a number for each layer"),
    f"{_LLAMA}flex_attention_mask": only_off("--reset-attention-mask keeps documents apart, --window-size is a window"),
    f"{_LLAMA}_use_doc_masking": switch("--reset-position-ids --reset-attention-mask"),
    **each_of(
        "_attn_implementation _fused_rotary_emb _fused_rms_norm _use_qkv_packed ring_attn_heads_k_stride "
        "pretraining_tp log_attn_probs use_cache",
        _KERNELS,
        _LLAMA,
    ),
    **each_of("bos_token_id eos_token_id pad_token_id", _SERVING, _LLAMA),
    f"{_LLAMA}initializer_range": Default("model.init_method says how weights begin"),
    f"{_LLAMA}moe_config.*": _EXPERTS,
    **{
        f"{_LLAMA}{name}": _starcoder(name)
        for name in [
            "activation_function",
            "attention_softmax_in_fp32",
            "attn_pdrop",
            "embd_pdrop",
            "global_attn_layers",
            "grouped_query",
            "layer_norm_epsilon",
            "multi_query",
            "num_kv_heads",
            "resid_pdrop",
            "scale_attention_softmax_in_fp32",
            "scale_attn_weights",
            "use_position_embeddings",
            "use_rotary_embeddings",
        ]
    },
    "optimizer.zero_stage": Cases(
        {"0": Default("plain data parallelism"), "1": Flags("--use-distributed-optimizer")},
        Refused("nanotron has ZeRO's stages 0 and 1"),
    ),
    "optimizer.weight_decay": Flags("--weight-decay {}"),
    "optimizer.weight_decay_exclude_named_params": only_off("norms and biases have no decay; no other is left out"),
    "optimizer.clip_grad": Flags("--clip-grad {}"),
    "optimizer.accumulate_grad_in_fp32": Cases(
        {"true": Flags("--accumulate-allreduce-grads-in-fp32"), "false": OFF}, NEITHER
    ),
    "optimizer.optimizer_factory.name": Cases(
        {"adamw": Flags("--optimizer adam"), "sgd": Flags("--optimizer sgd --sgd-momentum 0")},
        Refused("nanotron has adamW and sgd"),
    ),
    # Release 0.4 has them in `optimizer` itself.
    **{
        f"{section}.{name}": meaning
        for section in ("optimizer", "optimizer.optimizer_factory")
        for name, meaning in {
            "adam_eps": Flags("--adam-eps {}"),
            "adam_beta1": Flags("--adam-beta1 {}"),
            "adam_beta2": Flags("--adam-beta2 {}"),
            "torch_adam_is_fused": _KERNELS,
        }.items()
    },
    f"{_SCHEDULE}learning_rate": Flags("--lr {}"),
    f"{_SCHEDULE}lr_warmup_steps": Flags("--lr-warmup-iters {}"),
    f"{_SCHEDULE}lr_warmup_style": Cases(
        {"linear": OFF}, Refused("a warmup is linear here: write linear, or 0 steps of it")
    ),
    f"{_SCHEDULE}lr_decay_style": Depends(
        _START,
        {
            "null": Cases(
                {"linear": Flags("--lr-decay-style linear"), "cosine": Flags("--lr-decay-style cosine")},
                Refused("write linear or cosine, or lr_decay_starting_step with it"),
            )
        },
        Cases(
            {
                "linear": Flags("--lr-decay-style WSD --lr-wsd-decay-style linear"),
                "cosine": Flags("--lr-decay-style WSD --lr-wsd-decay-style cosine"),
                "1-sqrt": Flags("--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt"),
            },
            Refused("nanotron has linear, cosine and 1-sqrt"),
        ),
    ),
    # nanotron counts the decay from the end of the warmup, or from its own start.
    f"{_SCHEDULE}lr_decay_steps": Depends(
        _START,
        {"null": Combined("--lr-decay-iters {}", (f"{_SCHEDULE}lr_warmup_steps",), add)},
        Flags("--lr-wsd-decay-iters {}"),
    ),
    _START: Combined("--lr-decay-iters {}", (f"{_SCHEDULE}lr_decay_steps",), add),
    f"{_SCHEDULE}min_decay_lr": Flags("--min-lr {}"),
    "tokenizer.tokenizer_name_or_path": Flags("--tokenizer-type HuggingFaceTokenizer --tokenizer-model {}"),
    **each_of(
        "tokenizer_revision tokenizer_max_length", NoCounterpart("the folder of the tokenizer is one"), "tokenizer."
    ),
    **{f"{data}.seed": NoCounterpart("samples are drawn by --seed") for data in ("data", "data_stages.*.data")},
    **{f"{data}.num_loading_workers": Flags("--num-workers {}") for data in ("data", "data_stages.*.data")},
    "data.dataset.*": TEXT_BEFORE,
    "data_stages.*.data.dataset.*": TEXT_BEFORE,
    "data_stages.*.name": SHOWN,
    "data_stages.*.start_training_step": Cases(
        {"1": OFF}, Refused("a later stage of other data is a run of its own, which begins with --load")
    ),
    "data_stages.*.sequence_length": Refused("--stages gives lengths by step: leave it out, and give the flag"),
    "checkpoints.checkpoints_path": Flags("--save {}"),
    "checkpoints.checkpoint_interval": Flags("--save-interval {}"),
    "checkpoints.resume_checkpoint_path": _POSITION,
    **each_of(
        "save_initial_state save_final_state checkpoints_path_is_shared_file_system load_lr_scheduler load_optimizer",
        NoCounterpart("the end of a run is saved; --load goes on with all of it unless --no-load-... says otherwise"),
        "checkpoints.",
    ),
    "general.seed": Flags("--seed {}"),
    **each_of("project run benchmark_csv_path ignore_sanity_checks", SHOWN, "general."),
    **each_of("step consumed_train_samples", _POSITION, "general."),
    "logging.iteration_step_info_interval": Flags("--log-interval {}"),
    **each_of("logging.* metrics_logging.* profiler.*", SHOWN),
    **each_of("lighteval.* s3_upload.*", _AFTER),
}

IMPLIED = {"optimizer.weight_decay": NORMS_WITHOUT_DECAY}
DEFAULTS: dict[str, tuple[str, Any]] = {}
SHADOWED: dict[str, str] = {}
DEFAULT_ACCUMULATION = None
