"""Mistral: Llama without biases; windows are refused."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import (
    DECODER_FLAGS,
    DECODER_NAMES,
    decoder_json,
    decoder_values,
    refuse_window,
)


def _read(reading: Reading) -> dict[str, Any]:
    values = decoder_values(reading)
    refuse_window(reading)
    return values


def _write(config: Config) -> dict[str, Any]:
    return {**decoder_json(config), "sliding_window": None}


MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    DECODER_NAMES,
    {**DECODER_FLAGS, "qk_layernorm": False, "add_qkv_bias": False, "disable_bias_linear": True},
    _read,
    _write,
    {"num_key_value_heads": 8, "sliding_window": 4096},
)
