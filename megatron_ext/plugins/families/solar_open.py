"""Solar Open: glm4_moe's experts in all layers."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.glm4_moe import GLM4_MOE
from megatron_ext.plugins.families.mixtures import V3_MIXTURE
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import decoder_json, decoder_values, in_one_form, keys, switch

_ABSENT = ("first_k_dense_replace", "intermediate_size")


def _read(reading: Reading) -> dict[str, Any]:
    # There is no layer with an MLP, whose width published files say.
    sized = reading.changed(intermediate_size=reading.integer("moe_intermediate_size"))
    return {**decoder_values(sized), **V3_MIXTURE.values(reading, 0)}


def _write(config: Config) -> dict[str, Any]:
    content = {**decoder_json(config), **V3_MIXTURE.json(config)}
    return {key: value for key, value in content.items() if key not in _ABSENT}


SOLAR_OPEN = Family(
    "solar_open",
    "SolarOpenForCausalLM",
    {ours: theirs for ours, theirs in GLM4_MOE.names.items() if not ours.startswith("mlp.linear_")},
    {**GLM4_MOE.flags, "moe_layer_freq": None},
    *keys(
        in_one_form({"first_k_dense_replace": 0, "use_qk_norm": False}),
        (_read, _write),
        switch("attention_bias", "add_qkv_bias", False, given="has_qkv_bias"),
    ),
    {
        **{"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1280},
        **{"rope_theta": 1e6, "vocab_size": 196608, "hidden_size": 4096, "num_hidden_layers": 48},
        "num_attention_heads": 64,
    },
    {"n_routed_experts": "num_local_experts"},
    dependent_flags=V3_MIXTURE.dependent_flags,
    is_seldom=True,
)
