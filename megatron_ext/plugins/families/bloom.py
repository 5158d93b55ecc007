"""BLOOM, BLOOMZ: `--position-embedding-type alibi`, a norm of the word embeddings (`--embed-layernorm`), LayerNorm,
biases everywhere.

Queries, keys and values lie in Megatron's order.
"""

from typing import Any

from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import QKV, plain_json, plain_values, refuse_others, square_flags

_NAMES: dict[str, tuple[str, ...]] = {
    "embedding.word_embeddings": ("transformer.word_embeddings",),
    "embedding.word_embeddings_norm": ("transformer.word_embeddings_layernorm",),
    "input_layernorm": ("input_layernorm",),
    QKV: ("self_attention.query_key_value",),
    "self_attention.linear_proj": ("self_attention.dense",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    "mlp.linear_fc1": ("mlp.dense_h_to_4h",),
    "mlp.linear_fc2": ("mlp.dense_4h_to_h",),
    "decoder.final_layernorm": ("transformer.ln_f",),
    "output_layer": ("lm_head",),
}


_KEYS = ("hidden_size", "n_head", "n_layer", "seq_length", "layer_norm_epsilon")


def _read(reading: Reading) -> dict[str, Any]:
    refuse_others(reading, {"apply_residual_connection_post_layernorm": False, "n_inner": None})
    # Settings of the program that trained the model: its kernels, and the order in which results are rounded.
    reading.understand("attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "offset_alibi")
    reading.understand("skip_bias_add", "skip_bias_add_qkv", "slow_but_exact", "unk_token_id")
    return plain_values(reading, *_KEYS)


BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    _NAMES,
    {"position_embedding_type": "alibi", "embed_layernorm": True, "openai_gelu": True},
    _read,
    lambda config: plain_json(config.model, *_KEYS),
    {"hidden_size": 64, "n_head": 8, "n_layer": 2},
    aliases={"hidden_size": "n_embed", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"},
    dependent_flags=square_flags,
    layers="transformer.h.{}.",
    qkv_by_groups=True,
    dropouts=("attention_dropout", "hidden_dropout"),
)
