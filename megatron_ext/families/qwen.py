"""Qwen's models, from Qwen2 to Qwen3.5, dense and with experts."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families import delta_rules, shared
from megatron_ext.families.family import Family, Sections
from megatron_ext.families.mixtures import SPARSE_MIXTURE, ahead_values
from megatron_ext.families.reading import Reading

_SHARED = "shared_expert_intermediate_size"

# Qwen2: Llama with biases of queries, keys and values alone.
QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "add_qkv_bias": True, "disable_bias_linear": True},
    *shared.keys(shared.decoder(), shared.SWITCHABLE_WINDOWS),
    {"num_key_value_heads": 32, **shared.SWITCHED_WINDOWS},
    is_common=True,
)


# Qwen2-MoE: Qwen2 with experts in its layers, or in some of them, and a gated shared expert next to them.
_NAMES_QWEN2_MOE = {
    "mlp.shared_experts.gate_weight": ("mlp.shared_expert_gate.weight",),
    "mlp.shared_experts.linear_fc1": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared_experts.linear_fc2": ("mlp.shared_expert.down_proj",),
}


def _windows_qwen2_moe(reading: Reading) -> dict[str, Any]:
    last = reading.integer("max_window_layers", least=0)
    usual = [number % 2 == 0 and number < last for number in shared.layer_numbers(reading)]
    return shared.layer_window_values(reading, shared.typed_windows(reading, usual, switch="use_sliding_window"))


def _shared_qwen2_moe(model: ModelConfig) -> int:
    """Return the width of the shared expert, which is in every model."""
    return model.moe_shared_expert_intermediate_size or model.expert_ffn_hidden_size


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    {
        **{**shared.DECODER_NAMES, **shared.expert_names("mlp", gate="gate_proj", up="up_proj", down="down_proj")},
        **_NAMES_QWEN2_MOE,
    },
    {**shared.DECODER_FLAGS, "disable_bias_linear": True, "moe_shared_expert_gate": True},
    *shared.keys(
        shared.decoder(),
        (_windows_qwen2_moe, shared.switched_window_json),
        SPARSE_MIXTURE,
        shared.size(_SHARED, "moe_shared_expert_intermediate_size"),
        shared.switch("qkv_bias", "add_qkv_bias", True, given="has_qkv_bias"),
    ),
    {
        **{**shared.SWITCHED_WINDOWS, "num_key_value_heads": 16, "max_position_embeddings": 32768, "num_experts": 60},
        **{"num_experts_per_tok": 4, "moe_intermediate_size": 1408, _SHARED: 5632},
    },
    dependent_flags=lambda model: {"moe_shared_expert_intermediate_size": _shared_qwen2_moe(model)},
)


# Qwen3: Llama with norms of queries and keys, head by head.
QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "qk_layernorm": True, "disable_bias_linear": True},
    *shared.keys(shared.decoder(biases="attention"), shared.SWITCHABLE_WINDOWS),
    {"num_key_value_heads": 32, "head_dim": 128, **shared.SWITCHED_WINDOWS},
    dependent_flags=shared.biases_of_attention,
)


# Qwen3-MoE: Qwen3 with a mixture of experts in its layers, or in some of them.
def _windows_qwen3_moe(reading: Reading) -> dict[str, Any]:
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
        (_windows_qwen3_moe, shared.window_json),
        shared.in_one_form({"qkv_bias": False, "use_qk_norm": True, _SHARED: 0}),
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
)


# Qwen3-Next: gated delta rules in three of four layers, attention with gates in the fourth, and experts.
_AHEAD = {
    **{"eh_proj": ("mtp.fc",), "enorm": ("mtp.pre_fc_norm_embedding",), "hnorm": ("mtp.pre_fc_norm_hidden",)},
    "final_layernorm": ("mtp.norm",),
}
"""Around the layer that predicts the token after the next, which transformers leaves out. Its key is not in published
files, which have one."""


_RULE = delta_rules.rule_names("linear_attn", in_proj=("in_proj_qkvz", "in_proj_ba"))


def _dependent_qwen3_next(model: ModelConfig) -> dict[str, Any]:
    return {**delta_rules.shared_expert(model), "mtp_num_layers": 1 if model.mtp_num_layers else model.mtp_num_layers}


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    {**QWEN2_MOE.names, **_RULE, **_AHEAD},
    {**delta_rules.DELTA_FLAGS, "disable_bias_linear": True, "moe_shared_expert_gate": True},
    *shared.keys(
        (delta_rules.delta_values, delta_rules.delta_json),
        SPARSE_MIXTURE,
        shared.size(_SHARED, "moe_shared_expert_intermediate_size"),
        (ahead_values, lambda config: {"num_nextn_predict_layers": config.model.mtp_num_layers or 0}),
    ),
    {
        **{**delta_rules.DELTA_DEFAULTS, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10},
        **{"moe_intermediate_size": 512, _SHARED: 512, "norm_topk_prob": True},
        **{"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48, "vocab_size": 151936},
        "num_nextn_predict_layers": 1,
    },
    aliases={"num_experts": "num_local_experts"},
    dependent_flags=_dependent_qwen3_next,
    added={**delta_rules.DELTA_ADDED, **dict.fromkeys(("enorm", "hnorm", "final_layernorm"), 1.0)},
    ahead="mtp.layers.{}.",
    sections={"self_attention.in_proj": Sections((4, 2), by_groups=True), **delta_rules.CONVOLUTION},
)


# Qwen3.5's text model: Qwen3-Next with an MLP in every layer, and its projections apart.
_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
QWEN3_5_TEXT = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    {**shared.DECODER_NAMES, **delta_rules.rule_names("linear_attn", in_proj=_PROJECTIONS)},
    {**delta_rules.DELTA_FLAGS, "disable_bias_linear": True},
    *(lambda reading: delta_rules.delta_values(delta_rules.without_axes(reading)), delta_rules.delta_json),
    {
        **{**delta_rules.DELTA_DEFAULTS, "num_key_value_heads": 4, "hidden_size": 4096, "intermediate_size": 12288},
        **{"num_hidden_layers": 32, "vocab_size": 248320},
    },
    dependent_flags=shared.biases_of_attention,
    added=delta_rules.DELTA_ADDED,
    sections={"self_attention.in_proj": Sections((3, 1, 1, 1), by_groups=False), **delta_rules.CONVOLUTION},
)


# Qwen3.5's text model with experts in every layer.
def _read_qwen3_5_moe(reading: Reading) -> dict[str, Any]:
    width = reading.integer(_SHARED)
    # No layer has an MLP, whose width our flags have in any case.
    reading = delta_rules.without_axes(reading.changed(intermediate_size=width))
    return {**delta_rules.delta_values(reading), "moe_shared_expert_intermediate_size": width}


def _write_qwen3_5_moe(config: Config) -> dict[str, Any]:
    content = {**delta_rules.delta_json(config), _SHARED: config.model.moe_shared_expert_intermediate_size}
    return {key: value for key, value in content.items() if key != "intermediate_size"}


def _dependent_flags_qwen3_5_moe(model: ModelConfig) -> dict[str, Any]:
    width, of_shared = delta_rules.shared_width(model), delta_rules.shared_expert(model)
    return {**of_shared, "ffn_hidden_size": width}


QWEN3_5_MOE_TEXT = Family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    {**QWEN3_5_TEXT.names, **{name: of for name, of in QWEN2_MOE.names.items() if "mlp." in name}},
    {
        **QWEN3_5_TEXT.flags,
        "moe_shared_expert_gate": True,
        "moe_router_pre_softmax": False,
        "moe_layer_freq": None,
    },
    *shared.keys((_read_qwen3_5_moe, _write_qwen3_5_moe), shared.experts("num_experts", "moe_intermediate_size")),
    {
        **{**delta_rules.DELTA_DEFAULTS, "num_key_value_heads": 2, "hidden_size": 2048, "num_hidden_layers": 40},
        **{"vocab_size": 248320, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
        _SHARED: 512,
    },
    dependent_flags=_dependent_flags_qwen3_5_moe,
    added=delta_rules.DELTA_ADDED,
    sections=QWEN3_5_TEXT.sections,
)
