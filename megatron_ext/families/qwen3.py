"""Qwen3: Llama with norms of queries and keys, head by head."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading


def _read(reading: Reading) -> dict[str, Any]:
    return {**shared.decoder_values(reading, biases="attention"), **shared.switched_window_values(reading)}


def _write(config: Config) -> dict[str, Any]:
    return {**shared.decoder_json(config, biases="attention"), **shared.switched_window_json(config)}


QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "qk_layernorm": True, "disable_bias_linear": True},
    _read,
    _write,
    {"num_key_value_heads": 32, "head_dim": 128, **shared.SWITCHED_WINDOWS},
    dependent_flags=shared.biases_of_attention,
)
