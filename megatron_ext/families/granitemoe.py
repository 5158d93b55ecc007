"""Granite with a mixture of experts in every layer: the matrices of a layer's experts are one tensor."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.granite import granite_json, granite_values
from megatron_ext.families.reading import Reading

_OF_EXPERTS = {
    "mlp.router": ("block_sparse_moe.router.layer",),
    "mlp.experts.linear_fc1": ("block_sparse_moe.input_linear",),
    "mlp.experts.linear_fc2": ("block_sparse_moe.output_linear",),
}


def _read(reading: Reading) -> dict[str, Any]:
    values = {**shared.decoder_values(reading, biases="attention"), **granite_values(reading)}
    experts, width = reading.integer("num_local_experts"), reading.integer("intermediate_size")
    return {**values, **shared.expert_values(reading, experts, width, normalized=True)}


def _write(config: Config) -> dict[str, Any]:
    return {
        **shared.decoder_json(config, biases="attention"),
        **{**granite_json(config), **shared.expert_json(config)},
        "num_local_experts": config.model.num_experts,
        "intermediate_size": config.model.expert_ffn_hidden_size,
    }


GRANITEMOE = Family(
    "granitemoe",
    "GraniteMoeForCausalLM",
    {**shared.DECODER_NAMES, **_OF_EXPERTS},
    {**shared.DECODER_FLAGS, "disable_bias_linear": True, "moe_router_pre_softmax": False},
    _read,
    _write,
    {"num_local_experts": 8, "num_experts_per_tok": 2},
    dependent_flags=shared.biases_of_attention,
)
