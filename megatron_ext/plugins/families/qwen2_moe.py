"""Qwen1.5-MoE, Qwen2-MoE: qwen3_moe's experts and a shared one with a gate (`--moe-shared-expert-gate`); biases of
queries, keys and values."""

from typing import Any

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mixtures import SPARSE_MIXTURE
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import keys, size, switch

_NAMES = {
    "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
    "mlp.shared_experts.linear_fc1": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared_experts.linear_fc2": ("mlp.shared_expert.down_proj",),
}


def _windows(reading: Reading) -> dict[str, Any]:
    last = reading.integer("max_window_layers", least=0)
    usual = [number % 2 == 0 and number < last for number in shared.layer_numbers(reading)]
    return shared.layer_window_values(reading, shared.typed_windows(reading, usual, switch="use_sliding_window"))


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    {
        **{**shared.DECODER_NAMES, **shared.expert_names("mlp", gate="gate_proj", up="up_proj", down="down_proj")},
        **_NAMES,
    },
    {**shared.DECODER_FLAGS, "disable_bias_linear": True, "moe_shared_expert_gate": True},
    *keys(
        shared.decoder(),
        (_windows, shared.switched_window_json),
        SPARSE_MIXTURE,
        size("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        switch("qkv_bias", "add_qkv_bias", True, given="has_qkv_bias"),
    ),
    {
        **{**shared.SWITCHED_WINDOWS, "num_key_value_heads": 16, "max_position_embeddings": 32768, "num_experts": 60},
        **{"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    },
    dependent_flags=lambda model: {"moe_shared_expert_intermediate_size": shared.shared_expert_width(model)},
)
