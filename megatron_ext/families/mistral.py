"""Mistral: Llama without biases, whose layers may all have a window."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import (
    DECODER_FLAGS,
    DECODER_NAMES,
    decoder_json,
    decoder_values,
    window_json,
    window_values,
)


def _read(reading: Reading) -> dict[str, Any]:
    return {**decoder_values(reading), **window_values(reading)}


def _write(config: Config) -> dict[str, Any]:
    return {**decoder_json(config), **window_json(config)}


MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    DECODER_NAMES,
    {**DECODER_FLAGS, "disable_bias_linear": True},
    _read,
    _write,
    {"num_key_value_heads": 8, "sliding_window": 4096},
    is_common=True,
)
