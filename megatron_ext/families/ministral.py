"""Ministral: Mistral whose layers each have a window or none."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading


def _read(reading: Reading) -> dict[str, Any]:
    has_window = shared.typed_windows(reading, [True] * len(shared.layer_numbers(reading)))
    return {**shared.decoder_values(reading), **shared.layer_window_values(reading, has_window)}


def _write(config: Config) -> dict[str, Any]:
    return {**shared.decoder_json(config), **shared.typed_window_json(config)}


MINISTRAL = Family(
    "ministral",
    "MinistralForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "disable_bias_linear": True},
    _read,
    _write,
    {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
)
