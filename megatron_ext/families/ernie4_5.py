"""ERNIE 4.5, dense: Llama whose neighbouring channels are rotated together."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import DECODER_FLAGS, DECODER_NAMES, decoder_json, decoder_values


def _read(reading: Reading) -> dict[str, Any]:
    return {**decoder_values(reading), "disable_bias_linear": not reading.boolean("use_bias", False)}


def _write(config: Config) -> dict[str, Any]:
    return {**decoder_json(config), "use_bias": not config.model.disable_bias_linear}


ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    DECODER_NAMES,
    {**DECODER_FLAGS, "rotary_interleaved": True},
    _read,
    _write,
    {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
)
