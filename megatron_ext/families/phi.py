"""Microsoft's models: Phi, Phi-3 and Phi-3.5-MoE."""

import json
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.rotary import changed_scaling
from megatron_ext.parts.attention.describe import scaling_of

# Phi-1, 1.5 and 2: attention and MLP in parallel through one norm, biases everywhere, a share of the channels
# rotated.
_NAMES_PHI = {
    **shared.DECODER_NAMES,
    "self_attention.q_layernorm": ("self_attn.q_layernorm",),
    "self_attention.k_layernorm": ("self_attn.k_layernorm",),
    "self_attention.linear_proj": ("self_attn.dense",),
    "mlp.linear_fc1": ("mlp.fc1",),
    "mlp.linear_fc2": ("mlp.fc2",),
    "decoder.final_layernorm": ("model.final_layernorm",),
}

PHI = Family(
    "phi",
    "PhiForCausalLM",
    _NAMES_PHI,
    {
        **{**shared.DECODER_FLAGS, "swiglu": False, "normalization": "LayerNorm"},
        **{"parallel_residual": "one-norm", "lm_head_bias": True},
    },
    *shared.keys(
        shared.decoder(epsilon="layer_norm_eps", activation="gelu_new", partial=True),
        shared.switch("qk_layernorm", "qk_layernorm", False),
    ),
    {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    dependent_flags=shared.heads_fill_width,
)


# Phi-3 and Phi-4: fused matrices, and a share of the channels is rotated.
_NAMES_PHI3 = {**shared.DECODER_NAMES, shared.QKV: ("self_attn.qkv_proj",), "mlp.linear_fc1": ("mlp.gate_up_proj",)}


def _read_phi3(reading: Reading) -> dict[str, Any]:
    original = reading.integer("original_max_position_embeddings", 4096)  # read with longrope alone

    def with_original(key: str, scaling: dict[str, Any]) -> dict[str, Any]:
        if scaling.get("rope_type", scaling.get("type")) not in ("longrope", "su", "yarn"):
            return scaling
        words = f"but transformers takes the {original} next to {key}; say it once, or the same in both"
        inner = Reading(scaling, {})
        inner.refuse_unless("original_max_position_embeddings", original, original, words)
        reading.problems.extend(f"{key}: {problem}" for problem in inner.problems)
        # All three names are one kind.
        named = {name: "longrope" for name in ("rope_type", "type") if name in scaling}
        return {**scaling, **named, "original_max_position_embeddings": original}

    shared.refuse_others(reading, {"attention_bias": False})  # in the file of Phi-4
    scaled = changed_scaling(reading, with_original)
    values = shared.decoder_values(scaled, partial=True, scalings=("longrope",))
    return {**values, **shared.window_values(reading)}


def _write_phi3(config: Config) -> dict[str, Any]:
    model = config.model
    content = {**shared.decoder_json(config, partial=True), **shared.NO_PADDING, **shared.window_json(config)}
    if model.rope_type == "longrope":
        content["original_max_position_embeddings"] = model.original_max_position_embeddings
    return content


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    _NAMES_PHI3,
    {**shared.DECODER_FLAGS, "disable_bias_linear": True},
    _read_phi3,
    _write_phi3,
    {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    dependent_flags=lambda model: {"rope_type": "longrope" if model.rope_type else None},
)


# Phi-3.5-MoE: LayerNorm with biases, and two experts of each token that SparseMixer-v2 chooses.
_LENGTHS = ("short_mscale", "long_mscale")
"""Keys of what cosines and sines are multiplied by, in short sequences and in long ones."""


def _read_phimoe(reading: Reading) -> dict[str, Any]:
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


def _write_phimoe(config: Config) -> dict[str, Any]:
    content, scaling = shared.decoder_json(config, biases="attention"), scaling_of(config.model)
    if scaling is not None and content["rope_scaling"]:
        content["rope_scaling"] |= dict.fromkeys(_LENGTHS, scaling.of_table)
    return content


def _dependent_flags_phimoe(model: ModelConfig) -> dict[str, Any]:
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
        (_read_phimoe, _write_phimoe),
        shared.WINDOWS,
        shared.LOCAL_EXPERTS,
        shared.number("router_jitter_noise", "moe_router_sparsemixer_eps", 0.01),
        shared.switch("lm_head_bias", "lm_head_bias", False),
    ),
    {
        **{"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_position_embeddings": 131072},
        **{"num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01, "rope_theta": 1000000.0},
    },
    dependent_flags=_dependent_flags_phimoe,
)
