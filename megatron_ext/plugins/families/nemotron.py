"""Nemotron-3, Minitron: LayerNorm whose weight is stored as what it differs from 1, squared ReLU, a share of the
channels rotated."""

from typing import Any

from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import (
    DECODER_FLAGS,
    DECODER_NAMES,
    biases_of_attention,
    decoder,
    decoder_values,
)


def _read(reading: Reading) -> dict[str, Any]:
    values = decoder_values(reading, epsilon="norm_eps", activation="relu2", partial=True, biases="all")
    head = values["kv_channels"]  # which published files say once more, under our name, and transformers does not read
    reading.refuse_unless("kv_channels", head, head, f"but by head_dim a head has {head} channels")
    return values


NEMOTRON = Family(
    "nemotron",
    "NemotronForCausalLM",
    {**DECODER_NAMES, "mlp.linear_fc1": ("mlp.up_proj",)},
    {**DECODER_FLAGS, "swiglu": False, "squared_relu": True, "normalization": "LayerNorm"},
    _read,
    decoder(epsilon="norm_eps", partial=True, biases="all")[1],
    {"norm_eps": 1e-5, "partial_rotary_factor": 0.5, "max_position_embeddings": 4096},
    dependent_flags=biases_of_attention,
    added={"input_layernorm": 1.0, "pre_mlp_layernorm": 1.0, "decoder.final_layernorm": 1.0},
)
