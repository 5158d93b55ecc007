"""Lists the old spellings of Megatron's flags and of their values, each taken as the new one.

Other names of a flag that takes the same values, such as `--persistent-save-interval`, are aliases in the schema.
"""

from typing import Any

FLAGS: dict[str, tuple[str, str | None]] = {
    "--use-rotary-position-embeddings": ("position_embedding_type", "rope"),
    "--yarn-original-max-position-embeddings": ("original_max_position_embeddings", None),
    "--yarn-beta-fast": ("beta_fast", None),
    "--yarn-beta-slow": ("beta_slow", None),
    "--batch-size": ("micro_batch_size", None),
    "--model-parallel-size": ("tensor_model_parallel_size", None),
    "--warmup": ("lr_warmup_fraction", None),
    "--checkpoint-activations": ("recompute_granularity", "full"),
    "--encoder-num-layers": ("num_layers", None),
    "--encoder-seq-length": ("seq_length", None),
}
"""Flag -> field, and the value that the flag stands for; None where the flag takes the field's own value."""

EARLIER_FLAGS: dict[str, tuple[str, str | None]] = {
    "--layernorm-epsilon": ("norm_epsilon", None),
    "--checkpoint-num-layers": ("recompute_num_layers", None),
    "--activations-checkpoint-method": ("recompute_method", None),
    "--activations-checkpoint-num-layers": ("recompute_num_layers", None),
    "--override-lr-scheduler": ("override_opt_param_scheduler", None),
    "--use-checkpoint-lr-scheduler": ("use_checkpoint_opt_param_scheduler", None),
    "--tokenizer-name-or-path": ("tokenizer_model", None),
    "--context-parallel-algo": ("cp_comm_type", None),
    "--router-gating-in-fp32": ("moe_router_dtype", "fp32"),
    "--moe-router-fp32": ("moe_router_dtype", "fp32"),
    "--use-llama2-rotary-position-embeddings": ("position_embedding_type", "rope"),
    "--use-alibi-position-embeddings": ("position_embedding_type", "alibi"),
    "--rotary-position-embeddings-theta": ("rotary_base", None),
    "--moe-intermediate-size": ("moe_ffn_hidden_size", None),
    "--ds-sequence-parallel-size": ("context_parallel_size", None),
    "--num-key-value-heads": ("num_query_groups", None),
    "--num-attention-heads-kv": ("num_query_groups", None),
    "--pad-vocab-size-to": ("padded_vocab_size", None),
    "--intermediate-size": ("ffn_hidden_size", None),
    "--rope-theta": ("rotary_base", None),
    "--wandb-name": ("wandb_exp_name", None),
    "--wandb-project-name": ("wandb_project", None),
    "--wandb-entity-name": ("wandb_entity", None),
}
"""Flag -> field and value, for flags that Megatron no longer has, or that a fork has in place of Megatron's."""

_WHOLE_LAYERS = {"recompute_method": "uniform", "recompute_num_layers": 1}
IMPLIED: dict[str, dict[str, Any]] = {
    "--checkpoint-activations": _WHOLE_LAYERS,
    "--activations-checkpoint-method": {"recompute_granularity": "full", **_WHOLE_LAYERS},
    "--ds-sequence-parallel-size": {"cp_comm_type": ("a2a",)},
    "--num-key-value-heads": {"group_query_attention": True},
    "--num-attention-heads-kv": {"group_query_attention": True},
}
"""Old spelling -> values of further fields that it implies, unless a flag sets them."""

VALUES: dict[tuple[str, str], tuple[str, str | None]] = {
    ("tokenizer_type", "Llama2Tokenizer"): ("SentencePieceTokenizer", None),
    ("tokenizer_type", "GPTSentencePieceTokenizer"): ("SentencePieceTokenizer", None),
    ("cp_comm_type", "a2a+p2p"): ("p2p", "keys go around one ring of all context-parallel ranks, as with p2p"),
    ("eval_iters", "-1"): ("0", "there is no evaluation, as with --eval-iters 0"),
    ("moe_token_dispatcher_type", "flex"): (
        "alltoall",
        "tokens are sent to their experts by torch.distributed, as with --moe-token-dispatcher-type alltoall",
    ),
    **{
        ("ckpt_format", other): ("torch_dist", "checkpoints are written in torch_dist, which every layout can load")
        for other in ("torch", "torch_dcp", "fsdp_dtensor", "zarr")
    },
}
"""Field and value -> the value that is taken instead, and, where that works differently to the same end, how."""

VALUES_OF_FORKS: dict[tuple[str, str], tuple[str, str | None]] = {
    ("normalization", "rmsnorm"): ("RMSNorm", None),
    ("normalization", "layernorm"): ("LayerNorm", None),
    ("position_embedding_type", "rotary"): ("rope", None),
    ("position_embedding_type", "absolute"): ("learned_absolute", None),
    ("tokenizer_type", "PretrainedFromHF"): ("HuggingFaceTokenizer", None),
    ("optimizer", "fusedadamw"): ("adam", None),
    ("moe_token_dispatcher_type", "alltoall_seq"): ("alltoall", None),
    ("cp_comm_type", "megatron_cp_algo"): ("p2p", None),
    ("cp_comm_type", "ulysses_cp_algo"): ("a2a", None),
    ("cp_comm_type", "kvallgather_cp_algo"): ("all_gather", None),
    ("cp_comm_type", "hybrid_cp_algo"): ("p2p", "keys go around one ring of all context-parallel ranks, as with p2p"),
}
"""Field and value -> the value that is taken instead, for values that Megatron itself does not know."""
