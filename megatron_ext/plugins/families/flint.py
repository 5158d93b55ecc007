"""Flint: qwen3's attention with a sink that each head learns; layers without a window rotate nothing; experts chosen by
a sigmoid without a bias, next to a shared one, in the layers that `mlp_only_layers` leaves."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.cohere2 import fixed_without_windows, windows_alone_rotate
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mixtures import SPARSE_LAYERS, sigmoid_keys
from megatron_ext.plugins.families.qwen2_moe import QWEN2_MOE
from megatron_ext.plugins.families.reading import Reading

_NAMES = {name: theirs for name, theirs in QWEN2_MOE.names.items() if "gate_weight" not in name}
_DENSE = "mlp_only_layers"


def _read(reading: Reading) -> dict[str, Any]:
    numbers = shared.layer_numbers(reading)
    usual = [number > 1 and number % 4 != 1 and number != numbers[-1] for number in numbers]
    has_window = shared.typed_windows(reading, usual)
    values = {**shared.decoder_values(reading, biases="attention"), **shared.layer_window_values(reading, has_window)}
    dense = [number for number in (0, 1) if number < len(numbers)]
    whole = reading.changed(**{_DENSE: dense}) if reading.get(_DENSE) is None else reading
    return {**values, "no_rope_freq": fixed_without_windows(has_window), **SPARSE_LAYERS[0](whole)}


def _write(config: Config) -> dict[str, Any]:
    content = {**shared.decoder_json(config, biases="attention"), **SPARSE_LAYERS[1](config)}
    return {**content, **shared.typed_window_json(config)}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    shared_width = {"moe_shared_expert_intermediate_size": shared.shared_expert_width(model)}
    return {**shared.biases_of_attention(model), **windows_alone_rotate(model), **shared_width}


FLINT = Family(
    "flint",
    "FlintForCausalLM",
    {**_NAMES, "self_attention.core_attention.softmax_offset": ("self_attn.softmax_offset",)},
    {
        **{**shared.DECODER_FLAGS, "qk_layernorm": True, "disable_bias_linear": True, "softmax_type": "learnable"},
        "moe_router_score_function": "sigmoid",
    },
    *shared.keys(
        (_read, _write),
        sigmoid_keys("num_experts", "moe_intermediate_size"),
        shared.size("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    ),
    {
        **{"head_dim": 128, "num_key_value_heads": 4, "num_experts": 256, "num_experts_per_tok": 6},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 1024, "sliding_window": 513},
        **{"max_position_embeddings": 262144, "hidden_size": 2048, "intermediate_size": 6144},
        **{"num_hidden_layers": 49, "num_attention_heads": 32, "vocab_size": 150144, "router_aux_loss_coef": 0.0005},
    },
    dependent_flags=_dependent_flags,
)
