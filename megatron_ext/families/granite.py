"""Granite: Llama with factors of embeddings, of what layers add, of products of queries and keys, and of logits."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import (
    DECODER_FLAGS,
    DECODER_NAMES,
    biases_of_attention,
    decoder_json,
    decoder_values,
    granite_json,
    granite_values,
)


def _read(reading: Reading) -> dict[str, Any]:
    return {**decoder_values(reading, biases="all"), **granite_values(reading)}


def _write(config: Config) -> dict[str, Any]:
    return {**decoder_json(config, biases="all"), **granite_json(config)}


GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    DECODER_NAMES,
    DECODER_FLAGS,
    _read,
    _write,
    dependent_flags=biases_of_attention,
)
