"""OLMoE: experts in every layer, and norms of queries and keys over all heads of a token."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.mixtures import whole_json, whole_values
from megatron_ext.families.reading import Reading


def _read(reading: Reading) -> dict[str, Any]:
    values = shared.decoder_values(reading, biases="attention")
    return {**values, "qkv_clip": reading.number_or_none("clip_qkv"), **whole_values(reading)}


def _write(config: Config) -> dict[str, Any]:
    clip = {"clip_qkv": config.model.qkv_clip}
    return {**shared.decoder_json(config, biases="attention"), **clip, **whole_json(config)}


OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    shared.expert_names("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    {
        **{**shared.DECODER_FLAGS, "qk_layernorm": True, "qk_layernorm_over": "projection"},
        "disable_bias_linear": True,
    },
    _read,
    _write,
    {"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    aliases={"num_experts": "num_local_experts"},
    dependent_flags=lambda model: {**shared.heads_fill_width(model), **shared.biases_of_attention(model)},
)
