"""Qwen3.5 with experts, its text model: qwen3_next whose layers all have experts."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import delta_rules, qwen3_5_text
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.qwen2_moe import QWEN2_MOE
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import experts, keys, shared_expert_width

_SHARED = "shared_expert_intermediate_size"


def _read(reading: Reading) -> dict[str, Any]:
    width = reading.integer(_SHARED)
    # No layer has an MLP, whose width our flags have in any case.
    values = delta_rules.delta_values(reading.changed(intermediate_size=width))
    return {**values, "moe_shared_expert_intermediate_size": width}


def _write(config: Config) -> dict[str, Any]:
    content = {**delta_rules.delta_json(config), _SHARED: config.model.moe_shared_expert_intermediate_size}
    return {key: value for key, value in content.items() if key != "intermediate_size"}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    width, of_shared = shared_expert_width(model), delta_rules.shared_expert(model)
    return {**of_shared, "ffn_hidden_size": width}


QWEN3_5_MOE_TEXT = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    {**qwen3_5_text.QWEN3_5_TEXT.names, **{name: of for name, of in QWEN2_MOE.names.items() if "mlp." in name}},
    {
        **qwen3_5_text.QWEN3_5_TEXT.flags,
        "moe_shared_expert_gate": True,
        "moe_router_pre_softmax": False,
        "moe_layer_freq": None,
    },
    *keys((_read, _write), experts("num_experts", "moe_intermediate_size")),
    {
        **{**delta_rules.DELTA_DEFAULTS, "num_key_value_heads": 2, "hidden_size": 2048, "num_hidden_layers": 40},
        **{"vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
        _SHARED: 512,
    },
    dependent_flags=_dependent_flags,
    added=delta_rules.DELTA_ADDED,
    sections=qwen3_5_text.QWEN3_5_TEXT.sections,
)
