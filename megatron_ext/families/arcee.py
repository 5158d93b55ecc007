"""Arcee (AFM): Llama whose MLP is squared ReLU, without a gate."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import DECODER_FLAGS, DECODER_NAMES, biases_of_attention, decoder_json, decoder_values


def _read(reading: Reading) -> dict[str, Any]:
    return decoder_values(reading, activation="relu2", biases="all")


def _write(config: Config) -> dict[str, Any]:
    return decoder_json(config, biases="all")


ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    {**DECODER_NAMES, "mlp.linear_fc1": ("mlp.up_proj",)},
    {**DECODER_FLAGS, "swiglu": False, "squared_relu": True},
    _read,
    _write,
    {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    dependent_flags=biases_of_attention,
)
