"""StableLM 2: LayerNorm with SwiGLU, a quarter of the channels rotated, biases of queries, keys and values or none."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import (
    DECODER_FLAGS,
    DECODER_NAMES,
    decoder_json,
    decoder_values,
    heads_fill_width,
    refuse_others,
)


def _read(reading: Reading) -> dict[str, Any]:
    values = decoder_values(reading, epsilon="layer_norm_eps", partial=True)
    refuse_others(reading, {"qk_layernorm": False, "use_parallel_residual": False})
    return {**values, "add_qkv_bias": reading.boolean("use_qkv_bias", False)}


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        **decoder_json(config, "layer_norm_eps"),
        "partial_rotary_factor": model.rotary_percent,
        "use_qkv_bias": model.has_qkv_bias,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    }


STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    DECODER_NAMES,
    {**DECODER_FLAGS, "normalization": "LayerNorm", "disable_bias_linear": True},
    _read,
    _write,
    {"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
    dependent_flags=heads_fill_width,
)
