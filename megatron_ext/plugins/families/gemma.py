"""Gemma: `--geglu --openai-gelu`, norms whose weight is stored as what it differs from 1, embeddings times the square
root of the width."""

from typing import Any

from megatron_ext.config.schema import ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading


def _read(reading: Reading) -> dict[str, Any]:
    values = shared.decoder_values(reading, activation="gelu_pytorch_tanh", biases="attention")
    shared.refuse_others(reading, {"use_bidirectional_attention": False})
    # The released files say gelu, and mean its tanh form: so does transformers take it.
    return {**values, "openai_gelu": True, "embedding_multiplier": values["hidden_size"] ** 0.5}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    return {**shared.biases_of_attention(model), "embedding_multiplier": model.hidden_size**0.5}


GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "swiglu": False, "geglu": True, "openai_gelu": True, "disable_bias_linear": True},
    _read,
    shared.decoder(biases="attention")[1],
    {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 8192},
    dependent_flags=_dependent_flags,
    added={"input_layernorm": 1.0, "pre_mlp_layernorm": 1.0, "decoder.final_layernorm": 1.0},
)
