"""Qwen3: Llama with norms of queries and keys, head by head."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import (
    DECODER_FLAGS,
    DECODER_NAMES,
    SWITCHED_WINDOWS,
    biases_of_attention,
    decoder_json,
    decoder_values,
    switched_window_json,
    switched_window_values,
)


def _read(reading: Reading) -> dict[str, Any]:
    return {**decoder_values(reading, biases="attention"), **switched_window_values(reading)}


def _write(config: Config) -> dict[str, Any]:
    return {**decoder_json(config, biases="attention"), **switched_window_json(config)}


QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    DECODER_NAMES,
    {**DECODER_FLAGS, "qk_layernorm": True, "disable_bias_linear": True},
    _read,
    _write,
    {"num_key_value_heads": 32, "head_dim": 128, **SWITCHED_WINDOWS},
    dependent_flags=biases_of_attention,
)
