"""Mixtral: Mistral with a mixture of experts in every layer."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading

_NAMES = shared.expert_names("block_sparse_moe", gate="w1", up="w3", down="w2")


def _read(reading: Reading) -> dict[str, Any]:
    values = {**shared.decoder_values(reading), **shared.window_values(reading)}
    shared.refuse_others(reading, {"router_jitter_noise": 0.0})
    experts, width = reading.integer("num_local_experts"), reading.integer("intermediate_size")
    return {**values, **shared.expert_values(reading, experts, width, normalized=True)}


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        **shared.decoder_json(config),
        **shared.window_json(config),
        **shared.expert_json(config),
        "num_local_experts": model.num_experts,
        "intermediate_size": model.expert_ffn_hidden_size,
    }


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _NAMES,
    {**shared.DECODER_FLAGS, "disable_bias_linear": True, "moe_router_pre_softmax": False},
    _read,
    _write,
    {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
    },
    aliases={"num_local_experts": "num_experts"},
    is_common=True,
)
