"""GLM-4 of 2024: a share of the channels is rotated, neighbours together; gate and up projection are one matrix."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import DECODER_FLAGS, DECODER_NAMES, NO_PADDING, decoder_json, decoder_values

_NAMES = {**DECODER_NAMES, "mlp.linear_fc1": ("mlp.gate_up_proj",)}


def _read(reading: Reading) -> dict[str, Any]:
    return {**decoder_values(reading, partial=True), "add_qkv_bias": reading.boolean("attention_bias", True)}


def _write(config: Config) -> dict[str, Any]:
    return {**decoder_json(config, partial=True), **NO_PADDING, "attention_bias": config.model.has_qkv_bias}


GLM = Family(
    "glm",
    "GlmForCausalLM",
    _NAMES,
    {**DECODER_FLAGS, "rotary_interleaved": True, "disable_bias_linear": True},
    _read,
    _write,
    {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
    },
)
