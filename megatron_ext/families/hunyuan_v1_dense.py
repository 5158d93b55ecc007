"""Hunyuan, dense: Llama with norms of the heads of queries and keys, after they are rotated."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import DECODER_FLAGS, DECODER_NAMES, biases_of_attention, decoder_json, decoder_values

_NAMES = {
    **DECODER_NAMES,
    "self_attention.q_layernorm": ("self_attn.query_layernorm",),
    "self_attention.k_layernorm": ("self_attn.key_layernorm",),
}


def _read(reading: Reading) -> dict[str, Any]:
    return decoder_values(reading, alpha=True, biases="attention")


def _write(config: Config) -> dict[str, Any]:
    return decoder_json(config, biases="attention")


HUNYUAN = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    _NAMES,
    {**DECODER_FLAGS, "qk_layernorm": True, "qk_layernorm_place": "after", "disable_bias_linear": True},
    _read,
    _write,
    {"rms_norm_eps": 1e-5},
    dependent_flags=biases_of_attention,
)
