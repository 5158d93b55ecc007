"""Phi-1, 1.5 and 2: attention and MLP in parallel through one norm, biases everywhere, a share of the channels
rotated."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import DECODER_FLAGS, DECODER_NAMES, decoder_json, decoder_values, heads_fill_width

_NAMES = {
    **DECODER_NAMES,
    "self_attention.q_layernorm": ("self_attn.q_layernorm",),
    "self_attention.k_layernorm": ("self_attn.k_layernorm",),
    "self_attention.linear_proj": ("self_attn.dense",),
    "mlp.linear_fc1": ("mlp.fc1",),
    "mlp.linear_fc2": ("mlp.fc2",),
    "decoder.final_layernorm": ("model.final_layernorm",),
}


def _read(reading: Reading) -> dict[str, Any]:
    values = decoder_values(reading, epsilon="layer_norm_eps", activation="gelu_new", partial=True)
    return {**values, "qk_layernorm": reading.boolean("qk_layernorm", False)}


def _write(config: Config) -> dict[str, Any]:
    content = decoder_json(config, "layer_norm_eps", partial=True)
    return {**content, "qk_layernorm": config.model.qk_layernorm}


PHI = Family(
    "phi",
    "PhiForCausalLM",
    _NAMES,
    {
        **{**DECODER_FLAGS, "swiglu": False, "normalization": "LayerNorm"},
        **{"parallel_residual": "one-norm", "lm_head_bias": True},
    },
    _read,
    _write,
    {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    dependent_flags=heads_fill_width,
)
