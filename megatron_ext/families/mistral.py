"""Mistral: Llama without biases, whose layers may all have a window."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading


def _read(reading: Reading) -> dict[str, Any]:
    return {**shared.decoder_values(reading), **shared.window_values(reading)}


def _write(config: Config) -> dict[str, Any]:
    return {**shared.decoder_json(config), **shared.window_json(config)}


MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "disable_bias_linear": True},
    _read,
    _write,
    {"num_key_value_heads": 8, "sliding_window": 4096},
    is_common=True,
)
