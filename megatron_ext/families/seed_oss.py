"""Seed-OSS: Llama with biases of queries, keys and values, and of other matrices in all layers or none."""

import json
from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import DECODER_FLAGS, DECODER_NAMES, decoder_json, decoder_values


def _read(reading: Reading) -> dict[str, Any]:
    values = decoder_values(reading)
    of_queries, others = reading.boolean("attention_bias", True), reading.boolean("mlp_bias", False)
    reading.refuse_unless("attention_out_bias", others, False, f"but mlp_bias is {json.dumps(others)}: both or neither")
    if others and not of_queries:
        reading.problems.append("mlp_bias is true, but attention_bias is false: with that one, or without both")
    return {**values, "disable_bias_linear": not others, "add_qkv_bias": of_queries and not others}


def _write(config: Config) -> dict[str, Any]:
    others = not config.model.disable_bias_linear
    biases = {"attention_bias": config.model.has_qkv_bias, "attention_out_bias": others, "mlp_bias": others}
    return {**decoder_json(config), **biases}


SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    DECODER_NAMES,
    {**DECODER_FLAGS, "qk_layernorm": False},
    _read,
    _write,
    {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288},
)
