"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import (
    DECODER_FLAGS,
    EXPERT_FLAGS,
    KINDS,
    decoder_json,
    decoder_values,
    expert_json,
    expert_names,
    expert_values,
    layer_numbers,
    refuse_attention_bias,
    refuse_others,
    window_json,
    window_values,
)

_NAMES = expert_names("mlp", gate="gate_proj", up="up_proj", down="down_proj")
_DENSE = "some layers without experts, which is not supported"


def _read(reading: Reading) -> dict[str, Any]:
    values = {**decoder_values(reading), **window_values(reading, [reading.boolean("use_sliding_window", False)])}
    reading.understand("max_window_layers")  # all layers have the window
    kinds = [KINDS[values["window_size"] is not None] for _ in layer_numbers(reading)]
    reading.refuse_unless("layer_types", kinds, kinds, f"but all {len(kinds)} layers are {kinds[0]}")
    refuse_attention_bias(reading)
    experts, width = reading.integer("num_experts"), reading.integer("moe_intermediate_size")
    reading.refuse_unless("decoder_sparse_step", 1, 1, _DENSE)
    if reading.get("mlp_only_layers"):
        reading.problems.append(f"mlp_only_layers is {reading.get('mlp_only_layers')}, {_DENSE}")
    refuse_others(reading, {"qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0})
    normalized = reading.boolean("norm_topk_prob", False)
    return {**values, **expert_values(reading, experts, width, normalized=normalized)}


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        **decoder_json(config),
        "attention_bias": not model.disable_bias_linear,
        "use_sliding_window": model.window_size is not None,
        **window_json(config),
        **expert_json(config),
        "num_experts": model.num_experts,
        "moe_intermediate_size": model.expert_ffn_hidden_size,
        "norm_topk_prob": not model.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _NAMES,
    {
        **DECODER_FLAGS,
        **EXPERT_FLAGS,
        "qk_layernorm": True,
        "add_qkv_bias": False,
        "disable_bias_linear": True,
    },
    _read,
    _write,
    {
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "sliding_window": 4096,
        "max_position_embeddings": 32768,
    },
    # transformers 5 writes the name that Mixtral has.
    aliases={"num_experts": "num_local_experts"},
    free=frozenset({"window_size"}),
)
