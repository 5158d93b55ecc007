"""Llama: the decoder that others vary; with biases in all matrices or in none."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import DECODER_FLAGS, DECODER_NAMES, biases_of_attention, decoder_json, decoder_values


def _read(reading: Reading) -> dict[str, Any]:
    return decoder_values(reading, biases="all")


def _write(config: Config) -> dict[str, Any]:
    return decoder_json(config, biases="all")


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    DECODER_NAMES,
    DECODER_FLAGS,
    _read,
    _write,
    dependent_flags=biases_of_attention,
    is_common=True,
)
