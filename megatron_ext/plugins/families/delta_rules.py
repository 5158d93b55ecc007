"""Holds code that families with gated delta rules in most layers share, and code that Qwen3-Next and Qwen3.5 share
among them: gated attention in the other layers, and norms whose stored weight is the difference from 1."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.families.family import Sections
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import (
    DECODER_FLAGS,
    all_but_every,
    biases_of_attention,
    decoder_json,
    decoder_values,
    pattern,
    shared_expert_width,
    typed_layers,
)

RULE_KINDS = ("full_attention", "linear_attention")
"""Values of `layer_types`: attention, and a delta rule."""

RULE_SIZES = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
    "linear_num_value_heads",
)
_INTERVAL = "full_attention_interval"

DELTA_FLAGS: dict[str, Any] = {**DECODER_FLAGS, "qk_layernorm": True, "attention_output_gate": True}
DELTA_DEFAULTS: dict[str, Any] = {
    **{"partial_rotary_factor": 0.25, "max_position_embeddings": 32768, "head_dim": 256, "num_attention_heads": 16},
    **dict(zip(RULE_SIZES, (4, 128, 128, 16, 32), strict=True)),
}
CONVOLUTION = {"self_attention.conv1d": Sections((3,), by_groups=False)}
"""Order of the convolution's channels in the Hugging Face tensor: all queries, all keys, all values."""

_NORMS = ("input_layernorm", "pre_mlp_layernorm", "self_attention.q_layernorm", "self_attention.k_layernorm")
DELTA_ADDED: dict[str, float] = dict.fromkeys((*_NORMS, "decoder.final_layernorm"), 1.0)


def rule_names(module: str, **own: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the names of a layer's delta rule, which is the Hugging Face module `module`; `own`: parts with names of
    their own."""
    names = {**dict.fromkeys(("conv1d", "out_proj", "dt_bias", "A_log")), "out_norm": ("norm",), **own}
    return {
        f"self_attention.{ours}": tuple(f"{module}.{one}" for one in theirs or (ours,))
        for ours, theirs in names.items()
    }


def parts_apart(names: Mapping[str, Sequence[str]]) -> dict[str, Sections]:
    """Return the sections of these names whose projection and convolution lie in a tensor for each part."""
    divided = ("self_attention.in_proj", "self_attention.conv1d")
    return {module: Sections((1,) * len(names[module]), by_groups=False) for module in divided}


APART = {"conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"), "out_norm": ("o_norm",), "out_proj": ("o_proj",)}
"""Names of parts of a rule as flash-linear-attention has them."""


def delta_values(reading: Reading) -> dict[str, Any]:
    """Return the values of our flags of such a decoder, but for its MLP or experts."""
    usual = all_but_every(reading, reading.integer(_INTERVAL, 4))
    sizes = {name: reading.integer(name) for name in RULE_SIZES}
    of_values, of_keys = sizes["linear_num_value_heads"], sizes["linear_num_key_heads"]
    if of_values % of_keys:
        reading.problems.append(
            f"linear_num_value_heads {of_values} is not divisible by linear_num_key_heads {of_keys}"
        )
    return {
        **decoder_values(reading, partial=True, biases="attention"),
        **rule_values(reading, "gated_delta_net", usual),
        **sizes,
    }


def rule_values(reading: Reading, variant: str, usual: Sequence[bool]) -> dict[str, Any]:
    """Return the flags of the layers that have this rule by `layer_types`; `usual`: where it is missing."""
    has_rule = typed_layers(reading, RULE_KINDS, usual)
    return {
        "experimental_attention_variant": variant if any(has_rule) else None,
        "linear_attention_freq": pattern(has_rule) if any(has_rule) else None,
    }


def delta_json(config: Config) -> dict[str, Any]:
    """Return the content of `config.json` of such a decoder, but for its MLP or experts."""
    return {
        **decoder_json(config, partial=True, biases="attention"),
        **rule_json(config),
    }


def rule_json(config: Config) -> dict[str, Any]:
    """Return which layers have the rule, and its sizes."""
    model = config.model
    return {
        "layer_types": [RULE_KINDS[not one.has_attention] for one in layers(config)[: model.num_layers]],
        **{name: getattr(model, name) for name in RULE_SIZES},
    }


def shared_expert(model: ModelConfig) -> dict[str, Any]:
    """Return the width of the one shared expert, and the flag by which either all matrices of attention have biases or
    none has (`Family.dependent_flags`)."""
    return {**biases_of_attention(model), "moe_shared_expert_intermediate_size": shared_expert_width(model)}
