"""Gemma: GeGLU, norms whose weight is stored as what it differs from 1, embeddings times the root of the width."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import (
    DECODER_FLAGS,
    DECODER_NAMES,
    bias_json,
    bias_values,
    biases_of_attention,
    decoder_json,
    decoder_values,
    refuse_others,
)


def _read(reading: Reading) -> dict[str, Any]:
    values = decoder_values(reading, activation="gelu_pytorch_tanh")
    refuse_others(reading, {"use_bidirectional_attention": False})
    # The released files say gelu, and mean its tanh form: so does transformers take it.
    values |= {**bias_values(reading, mlp=False), "openai_gelu": True}
    return {**values, "embedding_multiplier": values["hidden_size"] ** 0.5}


def _write(config: Config) -> dict[str, Any]:
    return {**decoder_json(config), **bias_json(config, mlp=False)}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    return {**biases_of_attention(model), "embedding_multiplier": model.hidden_size**0.5}


GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    DECODER_NAMES,
    {**DECODER_FLAGS, "swiglu": False, "geglu": True, "openai_gelu": True, "disable_bias_linear": True},
    _read,
    _write,
    {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 8192},
    dependent_flags=_dependent_flags,
    added={"input_layernorm": 1.0, "pre_mlp_layernorm": 1.0, "decoder.final_layernorm": 1.0},
)
