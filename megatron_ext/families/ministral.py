"""Ministral: Mistral whose layers each have a window or none."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import (
    DECODER_FLAGS,
    DECODER_NAMES,
    decoder_json,
    decoder_values,
    layer_numbers,
    layer_window_values,
    typed_window_json,
    typed_windows,
)


def _read(reading: Reading) -> dict[str, Any]:
    has_window = typed_windows(reading, [True] * len(layer_numbers(reading)))
    return {**decoder_values(reading), **layer_window_values(reading, has_window)}


def _write(config: Config) -> dict[str, Any]:
    return {**decoder_json(config), **typed_window_json(config)}


MINISTRAL = Family(
    "ministral",
    "MinistralForCausalLM",
    DECODER_NAMES,
    {**DECODER_FLAGS, "disable_bias_linear": True},
    _read,
    _write,
    {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
)
