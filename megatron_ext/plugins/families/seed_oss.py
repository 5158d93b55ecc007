"""Seed-OSS: biases of queries, keys and values, of the output projection, of the MLP."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import DECODER_FLAGS, DECODER_NAMES, bias_flags, decoder_json, decoder_values


def _read(reading: Reading) -> dict[str, Any]:
    places = (("attention_bias", True), ("attention_out_bias", False), ("mlp_bias", False))
    return {**decoder_values(reading), **bias_flags(*(reading.boolean(key, usual) for key, usual in places))}


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    biases = {"attention_out_bias": model.has_output_bias, "mlp_bias": model.has_mlp_bias}
    return {**decoder_json(config), "attention_bias": model.has_qkv_bias, **biases}


SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    DECODER_NAMES,
    DECODER_FLAGS,
    _read,
    _write,
    {
        **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 524288},
        **dict.fromkeys(("attention_dropout", "residual_dropout"), 0.1),
    },
    dropouts=("attention_dropout", "residual_dropout"),
)
