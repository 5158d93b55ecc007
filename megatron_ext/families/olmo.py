"""Ai2's models: OLMo, OLMo-2, OLMo-3, those with experts and the hybrid one."""

from functools import partial
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families import delta_rules, shared
from megatron_ext.families.family import Family
from megatron_ext.families.mixtures import WHOLE_MIXTURE
from megatron_ext.families.reading import Reading
from megatron_ext.families.rotary import local_base, rotary_by_layer, rotary_by_layer_json, scaled_without_windows

# OLMo: Llama whose norms are LayerNorm without parameters; queries, keys and values may be clipped.
OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    {name: theirs for name, theirs in shared.DECODER_NAMES.items() if "layernorm" not in name},
    {
        **{**shared.DECODER_FLAGS, "normalization": "LayerNorm", "norm_parameters": "none", "norm_epsilon": 1e-5},
        "disable_bias_linear": True,
    },
    *shared.keys(shared.decoder(epsilon=None, biases="attention"), shared.CLIPS),
    dependent_flags=shared.biases_of_attention,
)


# OLMoE: experts in every layer, and norms of queries and keys over all heads of a token.
OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    shared.expert_names("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    {
        **{**shared.DECODER_FLAGS, "qk_layernorm": True, "qk_layernorm_over": "projection"},
        "disable_bias_linear": True,
    },
    *shared.keys(shared.decoder(biases="attention"), shared.CLIPS, WHOLE_MIXTURE),
    {"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    aliases={"num_experts": "num_local_experts"},
    dependent_flags=lambda model: {**shared.heads_fill_width(model), **shared.biases_of_attention(model)},
)


# OLMo-2: Llama with norms after attention and MLP, and with norms of queries and keys over all heads of a token.
OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    shared.NAMES_WITH_NORMS_AFTER,
    {
        **shared.DECODER_FLAGS,
        "norm_position": "after",
        "qk_layernorm": True,
        "qk_layernorm_over": "projection",
        "disable_bias_linear": True,
    },
    *shared.decoder(biases="attention"),
    {"rms_norm_eps": 1e-5},
    dependent_flags=shared.biases_of_attention,
)


# FlexOlmo: OLMo-2 with experts in every layer.
FLEX_OLMO = Family(
    "flex_olmo",
    "FlexOlmoForCausalLM",
    {
        **shared.expert_names("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        **shared.NAMES_WITH_NORMS_AFTER,
    },
    {
        **{**shared.DECODER_FLAGS, "norm_position": "after", "qk_layernorm": True, "qk_layernorm_over": "projection"},
        "disable_bias_linear": True,
    },
    *shared.keys(shared.decoder(biases="attention"), shared.WITHOUT_PADDING, WHOLE_MIXTURE),
    {"num_experts": 7, "num_experts_per_tok": 5, "rope_theta": 500000.0, "max_position_embeddings": 4096},
    aliases={"num_experts": "num_local_experts"},
    dependent_flags=shared.biases_of_attention,
)


# OLMo-3: OLMo-2 whose layers each have a window or none; frequencies are stretched in those without one.
def _read_olmo3(reading: Reading) -> dict[str, Any]:
    # Next to `rope_parameters` it is that of all layers or of those without a window, by transformers' version.
    shared.refuse_others(reading, {"rope_theta": 500000.0})
    windows = shared.layer_window_values(reading, shared.typed_windows(reading, shared.all_but_every(reading, 4)))
    reading, local = rotary_by_layer(reading, 500000.0)
    return local_base({**shared.decoder_values(reading, biases="attention"), **windows, **local})


def _write_olmo3(config: Config) -> dict[str, Any]:
    return rotary_by_layer_json({**OLMO2.write(config), **shared.typed_window_json(config)}, config.model)


OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    OLMO2.names,
    OLMO2.flags,
    _read_olmo3,
    _write_olmo3,
    {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
    dependent_flags=lambda model: {**shared.biases_of_attention(model), **scaled_without_windows(model)},
)


# OLMo hybrid: gated delta rules in most layers, with norms before them, and OLMo-3's attention in the others, with
# norms after it; the released model knows no positions.  Files are as published. transformers 5.23 reads them; what
# it writes itself divides the convolution's channels into three equal parts, whatever their sizes, and names norms
# otherwise.
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
_RULE = delta_rules.rule_names("linear_attn", in_proj=_PROJECTIONS, **delta_rules.APART)
_epsilon = partial(shared.own_epsilon, "linear_norm_epsilon", 1e-5)


def _read_olmo_hybrid(reading: Reading) -> dict[str, Any]:
    rotary = reading.content.get("rope_parameters")
    rotates = not (isinstance(rotary, dict) and rotary.get("rope_theta", 0.0) is None)
    numbers = shared.layer_numbers(reading)
    usual = shared.all_but_every(reading, 4)
    if all(usual):
        usual[-1] = False
    values = {
        **shared.decoder_values(reading if rotates else reading.changed(rope_parameters=None), biases="attention"),
        **delta_rules.rule_values(reading, "gated_delta_net", usual),
        "position_embedding_type": "rope" if rotates else "none",
        "linear_allow_neg_eigval": reading.boolean("linear_allow_neg_eigval", True),
    }
    if values["linear_attention_freq"] in (None, shared.pattern([True] * len(numbers))):
        reading.problems.append(f"layer_types must have both {' and '.join(delta_rules.RULE_KINDS)}")
    heads = values["num_attention_heads"]
    keys = reading.integer("linear_num_key_heads", heads)
    size = reading.integer("linear_key_head_dim", max(int(0.75 * values["hidden_size"] / keys), 1))
    sizes = (
        *(reading.integer("linear_conv_kernel_dim", 4), size, reading.integer("linear_value_head_dim", 2 * size), keys),
        reading.integer("linear_num_value_heads", heads),
    )
    return {**values, **dict(zip(delta_rules.RULE_SIZES, sizes, strict=True)), **_epsilon(values["norm_epsilon"])}


def _write_olmo_hybrid(config: Config) -> dict[str, Any]:
    model, content = config.model, shared.decoder_json(config, biases="attention")
    if model.position_embedding_type == "none":
        del content["rope_theta"], content["rope_scaling"]
        content["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
    signs = {"linear_allow_neg_eigval": model.linear_allow_neg_eigval}
    return {**content, **delta_rules.rule_json(config), **signs, **shared.NO_PADDING}


def _dependent_olmo_hybrid(model: ModelConfig) -> dict[str, Any]:
    return {**shared.biases_of_attention(model), **_epsilon(model.norm_epsilon)}


OLMO_HYBRID = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    {**shared.DECODER_NAMES, **shared.NAMES_WITH_NORMS_AFTER, **_RULE},
    {
        **{"swiglu": True, "normalization": "RMSNorm", "norm_position": "after-attention", "qk_layernorm": True},
        **{"qk_layernorm_over": "projection", "disable_bias_linear": True},
    },
    _read_olmo_hybrid,
    _write_olmo_hybrid,
    {
        **{"vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_hidden_layers": 32},
        **{"num_attention_heads": 30, "max_position_embeddings": 65536},
    },
    dependent_flags=_dependent_olmo_hybrid,
    sections=delta_rules.parts_apart(_RULE),
)
