"""Qwen2: Llama with biases of queries, keys and values alone."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import (
    DECODER_FLAGS,
    DECODER_NAMES,
    SWITCHED_WINDOWS,
    decoder_json,
    decoder_values,
    switched_window_json,
    switched_window_values,
)


def _read(reading: Reading) -> dict[str, Any]:
    return {**decoder_values(reading), **switched_window_values(reading)}


def _write(config: Config) -> dict[str, Any]:
    return {**decoder_json(config), **switched_window_json(config)}


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    DECODER_NAMES,
    {**DECODER_FLAGS, "add_qkv_bias": True, "disable_bias_linear": True},
    _read,
    _write,
    {"num_key_value_heads": 32, **SWITCHED_WINDOWS},
    is_common=True,
)
