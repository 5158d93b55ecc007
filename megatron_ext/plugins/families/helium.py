"""Helium: neighbouring channels are rotated together; biases of queries, keys and values, and of the MLP."""

from typing import Any

from megatron_ext.config.schema import ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading


def _read(reading: Reading) -> dict[str, Any]:
    values = shared.decoder_values(reading)
    hidden, channels = values["hidden_size"], values["num_attention_heads"] * values["kv_channels"]
    if hidden != channels and reading.is_readable:
        reading.problems.append(
            f"hidden_size is {hidden}, but num_attention_heads x head_dim {channels}, and both are the width of the "
            "output projection"
        )
    return {**values, **shared.bias_flags(reading.boolean("attention_bias", False), False, _of_mlp(reading))}


def _of_mlp(reading: Reading) -> bool:
    return reading.boolean("mlp_bias", False)


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    return {**shared.heads_fill_width(model), "add_output_bias": False, "disable_bias_linear": True}


HELIUM = Family(
    "helium",
    "HeliumForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "rotary_interleaved": True},
    _read,
    lambda config: {
        **shared.decoder_json(config),
        **{"attention_bias": config.model.has_qkv_bias, "mlp_bias": config.model.has_mlp_bias, **shared.NO_PADDING},
    },
    {
        **{"num_key_value_heads": 20, "head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5},
        "max_position_embeddings": 4096,
    },
    dependent_flags=_dependent_flags,
    is_seldom=True,
)
