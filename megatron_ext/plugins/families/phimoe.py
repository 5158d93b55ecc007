"""Phi-3.5-MoE: LayerNorm with biases; two experts of each token by SparseMixer-v2 (`--moe-router-sparsemixer-eps`,
`router_jitter_noise`), drawn in training; longrope with one `short_mscale` and `long_mscale`. Beyond the original
context transformers' class takes the short factors, and here the long ones are taken, as Microsoft's own code does."""

import json
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.attention.describe import scaling_of
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.rotary import changed_scaling

_LENGTHS = ("short_mscale", "long_mscale")
"""Keys of the factors of cosines and sines, in short sequences and in long ones."""


def _read(reading: Reading) -> dict[str, Any]:
    def with_one_factor(key: str, scaling: dict[str, Any]) -> dict[str, Any]:
        if scaling.get("rope_type", scaling.get("type")) != "longrope":
            return scaling
        of_short, of_long = (scaling.get(name) for name in _LENGTHS)
        if of_short is None or of_short != of_long:
            both = f"short_mscale {json.dumps(of_short)} and long_mscale {json.dumps(of_long)}"
            reading.problems.append(f"{key}: {both} are not one number, which is not supported")
        left = {name: value for name, value in scaling.items() if name not in _LENGTHS}
        return {**left, "attention_factor": of_short}

    reading.understand("original_max_position_embeddings")  # which stands with longrope
    scaled = changed_scaling(reading, with_one_factor)
    return shared.decoder_values(scaled, biases="attention", scalings=("longrope",))


def _write(config: Config) -> dict[str, Any]:
    content, scaling = shared.decoder_json(config, biases="attention"), scaling_of(config.model)
    if scaling is not None and content["rope_scaling"]:
        content["rope_scaling"] |= dict.fromkeys(_LENGTHS, scaling.of_table)
    return content


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    of_rotation = {"rope_type": "longrope" if model.rope_type else None}
    return {**shared.biases_of_attention(model), **of_rotation, "moe_router_topk": 2}


PHIMOE = Family(
    "phimoe",
    "PhimoeForCausalLM",
    shared.expert_names("block_sparse_moe", gate="w1", up="w3", down="w2"),
    {
        **{**shared.DECODER_FLAGS, "normalization": "LayerNorm", "disable_bias_linear": True},
        "moe_router_pre_softmax": False,
    },
    *shared.keys(
        shared.in_one_form({"input_jitter_noise": 0.0, "num_experts_per_tok": 2}),
        (_read, _write),
        shared.WINDOWS,
        shared.LOCAL_EXPERTS,
        shared.number("router_jitter_noise", "moe_router_sparsemixer_eps", 0.01),
        shared.switch("lm_head_bias", "lm_head_bias", False),
    ),
    {
        **{"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        **{"num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01, "rope_theta": 1000000.0},
    },
    dependent_flags=_dependent_flags,
)
