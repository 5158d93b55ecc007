"""Qwen2: Llama with biases of queries, keys and values alone."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import (
    DECODER_FLAGS,
    DECODER_NAMES,
    decoder_json,
    decoder_values,
    refuse_chosen_windows,
)


def _read(reading: Reading) -> dict[str, Any]:
    values = decoder_values(reading)
    refuse_chosen_windows(reading)
    return values


def _write(config: Config) -> dict[str, Any]:
    return {**decoder_json(config), "use_sliding_window": False}


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    DECODER_NAMES,
    {**DECODER_FLAGS, "qk_layernorm": False, "add_qkv_bias": True, "disable_bias_linear": True},
    _read,
    _write,
    {"num_key_value_heads": 32},
)
