"""OLMo: Llama whose norms are LayerNorm without parameters; queries, keys and values may be clipped."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import DECODER_FLAGS, DECODER_NAMES, biases_of_attention, decoder_json, decoder_values


def _read(reading: Reading) -> dict[str, Any]:
    values = decoder_values(reading, epsilon=None, biases="attention")
    return {**values, "qkv_clip": reading.number_or_none("clip_qkv")}


def _write(config: Config) -> dict[str, Any]:
    return {**decoder_json(config, epsilon=None, biases="attention"), "clip_qkv": config.model.qkv_clip}


OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    {name: theirs for name, theirs in DECODER_NAMES.items() if "layernorm" not in name},
    {
        **{**DECODER_FLAGS, "normalization": "LayerNorm", "norm_parameters": "none", "norm_epsilon": 1e-5},
        "disable_bias_linear": True,
    },
    _read,
    _write,
    dependent_flags=biases_of_attention,
)
