"""Phi-3.5-MoE: LayerNorm with biases, and two experts of each token that SparseMixer-v2 chooses."""

import json
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading, refuse_others
from megatron_ext.parts.attention.describe import scaling_of

_LENGTHS = ("short_mscale", "long_mscale")
"""Keys of what cosines and sines are multiplied by, in short sequences and in long ones."""


def _read(reading: Reading) -> dict[str, Any]:
    for key in ("rope_scaling", "rope_parameters"):
        scaling = reading.get(key)
        if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "longrope":
            of_short, of_long = (scaling.get(name) for name in _LENGTHS)
            if of_short is None or of_short != of_long:
                both = f"short_mscale {json.dumps(of_short)} and long_mscale {json.dumps(of_long)}"
                reading.problems.append(f"{key}: {both} are not one number, which is not supported")
            left = {name: value for name, value in scaling.items() if name not in _LENGTHS}
            reading = reading.changed(**{key: {**left, "attention_factor": of_short}})
    reading.understand("original_max_position_embeddings")  # which stands with longrope
    refuse_others(reading, {"input_jitter_noise": 0.0, "num_experts_per_tok": 2})
    experts, width = reading.integer("num_local_experts"), reading.integer("intermediate_size")
    return {
        **shared.decoder_values(reading, biases="attention", scalings=("longrope",)),
        **shared.window_values(reading),
        **shared.expert_values(reading, experts, width, normalized=True),
        "moe_router_sparsemixer_eps": reading.number("router_jitter_noise", 0.01),
        "lm_head_bias": reading.boolean("lm_head_bias", False),
    }


def _write(config: Config) -> dict[str, Any]:
    model, content = config.model, shared.decoder_json(config, biases="attention")
    scaling, factors = scaling_of(model), content["rope_scaling"]
    if scaling is not None and factors:
        content["rope_scaling"] = {**factors, **dict.fromkeys(_LENGTHS, scaling.of_table)}
    return {
        **{**content, **shared.window_json(config), **shared.expert_json(config)},
        **{"num_local_experts": model.num_experts, "intermediate_size": model.expert_ffn_hidden_size},
        **{"router_jitter_noise": model.moe_router_sparsemixer_eps, "lm_head_bias": model.lm_head_bias},
    }


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    of_rotation = {"rope_type": "longrope" if model.rope_type else None}
    return {**shared.biases_of_attention(model), **of_rotation, "moe_router_topk": 2}


PHIMOE = Family(
    "phimoe",
    "PhimoeForCausalLM",
    shared.expert_names("block_sparse_moe", gate="w1", up="w3", down="w2"),
    {
        **shared.DECODER_FLAGS,
        "normalization": "LayerNorm",
        "disable_bias_linear": True,
        "moe_router_pre_softmax": False,
    },
    _read,
    _write,
    {
        **{"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        **{"num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01, "rope_theta": 1000000.0},
    },
    dependent_flags=_dependent_flags,
)
