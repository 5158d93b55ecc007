"""Persimmon: LayerNorm, also of the heads of queries and keys, squared ReLU, a share of the channels rotated.

Queries, keys and values lie in Megatron's order.
"""

from typing import Any

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading

_NAMES = {
    **shared.DECODER_NAMES,
    shared.QKV: ("self_attn.query_key_value",),
    "self_attention.q_layernorm": ("self_attn.q_layernorm",),
    "self_attention.k_layernorm": ("self_attn.k_layernorm",),
    "self_attention.linear_proj": ("self_attn.dense",),
    "mlp.linear_fc1": ("mlp.dense_h_to_4h",),
    "mlp.linear_fc2": ("mlp.dense_4h_to_h",),
    "decoder.final_layernorm": ("model.final_layernorm",),
}


def _read(reading: Reading) -> dict[str, Any]:
    values = shared.decoder_values(reading, epsilon="layer_norm_eps", activation="relu2", partial=True)
    for key, value in (("num_key_value_heads", values["num_attention_heads"]), ("head_dim", _head(values))):
        reading.refuse_unless(key, value, value, f"but in this class it is {value}")
    return values


def _head(values: dict[str, Any]) -> int:
    return values["hidden_size"] // values["num_attention_heads"]


PERSIMMON = Family(
    "persimmon",
    "PersimmonForCausalLM",
    _NAMES,
    {"position_embedding_type": "rope", "squared_relu": True},
    *shared.keys(
        (_read, shared.decoder(epsilon="layer_norm_eps", partial=True)[1]),
        shared.switch("qk_layernorm", "qk_layernorm", True),
    ),
    {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 16384},
    dependent_flags=lambda model: {
        **shared.heads_fill_width(model),
        **{"num_query_groups": model.num_attention_heads, "group_query_attention": False},
    },
    qkv_by_groups=True,
    dropouts=("attention_dropout", "hidden_dropout"),
    is_seldom=True,
)
