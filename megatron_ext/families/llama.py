"""Llama: the decoder that others vary; with biases in all matrices or in none."""

import json
from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import DECODER_FLAGS, DECODER_NAMES, decoder_json, decoder_values


def _read(reading: Reading) -> dict[str, Any]:
    values = decoder_values(reading)
    biases = reading.boolean("attention_bias", False)
    reading.refuse_unless(
        "mlp_bias", biases, False, f"but attention_bias is {json.dumps(biases)}: biases are in all layers or none"
    )
    return {**values, "disable_bias_linear": not biases}


def _write(config: Config) -> dict[str, Any]:
    biases = not config.model.disable_bias_linear
    return {**decoder_json(config), "attention_bias": biases, "mlp_bias": biases}


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    DECODER_NAMES,
    {**DECODER_FLAGS, "qk_layernorm": False, "add_qkv_bias": False},
    _read,
    _write,
)
