"""Qwen2-MoE: Qwen2 with experts in its layers, or in some of them, and a gated shared expert next to them."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.mixtures import sparse_json, sparse_values
from megatron_ext.families.reading import Reading

_NAMES = {
    "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
    "mlp.shared_experts.linear_fc1": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared_experts.linear_fc2": ("mlp.shared_expert.down_proj",),
}


def _read(reading: Reading) -> dict[str, Any]:
    last = reading.integer("max_window_layers", least=0)
    usual = [number % 2 == 0 and number < last for number in shared.layer_numbers(reading)]
    return {
        **shared.decoder_values(reading),
        **shared.layer_window_values(reading, shared.typed_windows(reading, usual, switch="use_sliding_window")),
        **sparse_values(reading),
        "moe_shared_expert_intermediate_size": reading.integer("shared_expert_intermediate_size"),
        "add_qkv_bias": reading.boolean("qkv_bias", True),
    }


def _write(config: Config) -> dict[str, Any]:
    return {
        **shared.decoder_json(config),
        **shared.switched_window_json(config),
        **sparse_json(config),
        "shared_expert_intermediate_size": config.model.moe_shared_expert_intermediate_size,
        "qkv_bias": config.model.has_qkv_bias,
    }


def _shared(model: ModelConfig) -> int:
    """Return the width of the shared expert, which is in every model."""
    return model.moe_shared_expert_intermediate_size or model.expert_ffn_hidden_size


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    {
        **{**shared.DECODER_NAMES, **shared.expert_names("mlp", gate="gate_proj", up="up_proj", down="down_proj")},
        **_NAMES,
    },
    {**shared.DECODER_FLAGS, "disable_bias_linear": True, "moe_shared_expert_gate": True},
    _read,
    _write,
    {
        **{**shared.SWITCHED_WINDOWS, "num_key_value_heads": 16, "max_position_embeddings": 32768, "num_experts": 60},
        **{"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    },
    dependent_flags=lambda model: {"moe_shared_expert_intermediate_size": _shared(model)},
)
