"""Qwen2: Llama with biases of queries, keys and values alone."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading


def _read(reading: Reading) -> dict[str, Any]:
    return {**shared.decoder_values(reading), **shared.switched_window_values(reading)}


def _write(config: Config) -> dict[str, Any]:
    return {**shared.decoder_json(config), **shared.switched_window_json(config)}


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "add_qkv_bias": True, "disable_bias_linear": True},
    _read,
    _write,
    {"num_key_value_heads": 32, **shared.SWITCHED_WINDOWS},
    is_common=True,
)
