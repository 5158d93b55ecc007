"""Qwen3-MoE: experts in all layers or some (`--moe-layer-freq`); `norm_topk_prob` false is
`--moe-router-pre-softmax`."""

from typing import Any

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mixtures import SPARSE_MIXTURE
from megatron_ext.plugins.families.reading import Reading


def _windows(reading: Reading) -> dict[str, Any]:
    reading.understand("sliding_window")
    used = reading.boolean("use_sliding_window", False)
    values = shared.window_values(reading) if used else {"window_size": None}
    reading.understand("max_window_layers")  # all layers have the window
    numbers = shared.layer_numbers(reading)
    kinds = [shared.KINDS[values["window_size"] is not None] for _ in numbers]
    reading.refuse_unless("layer_types", kinds, kinds, f"but all {len(kinds)} layers are {kinds[0]}")
    return values


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {**shared.DECODER_NAMES, **shared.expert_names("mlp", gate="gate_proj", up="up_proj", down="down_proj")},
    {**shared.DECODER_FLAGS, "qk_layernorm": True, "disable_bias_linear": True},
    *shared.keys(
        shared.decoder(biases="attention"),
        (_windows, shared.window_json),
        shared.in_one_form({"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0}),
        SPARSE_MIXTURE,
        (lambda reading: {}, lambda config: {"use_sliding_window": config.model.window_size is not None}),
    ),
    {
        **{"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        **{"norm_topk_prob": False, "sliding_window": 4096, "max_position_embeddings": 32768},
    },
    # transformers 5 writes the name that Mixtral has.
    aliases={"num_experts": "num_local_experts"},
    dependent_flags=shared.biases_of_attention,
    other_names={
        "qwen3_vl_moe_text": {},
        "qwen3_omni_moe_text": {"norm_topk_prob": True, "rope_theta": 1e6, "sliding_window": None},
    },
)
