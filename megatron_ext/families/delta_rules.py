"""Holds what families with gated delta rules in most layers have in common, and Qwen3-Next and Qwen3.5 among them:
attention with gates in the others, norms that hold what they differ from 1."""

import json
from collections.abc import Sequence
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families.family import Sections
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import (
    DECODER_FLAGS,
    biases_of_attention,
    decoder_json,
    decoder_values,
    layer_numbers,
    pattern,
)
from megatron_ext.parts.stack import layers

RULE_KINDS = ("full_attention", "linear_attention")
"""What `layer_types` says of a layer."""

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
"""How its channels lie there: all queries, all keys, all values."""

_NORMS = ("input_layernorm", "pre_mlp_layernorm", "self_attention.q_layernorm", "self_attention.k_layernorm")
DELTA_ADDED: dict[str, float] = dict.fromkeys((*_NORMS, "decoder.final_layernorm"), 1.0)


def delta_names(*projections: str) -> dict[str, tuple[str, ...]]:
    """Return the names of a layer's gated delta rule, of which these are the parts of the first projection."""
    names = {"conv1d": "conv1d", "out_norm": "norm", "out_proj": "out_proj", "dt_bias": "dt_bias", "A_log": "A_log"}
    found = {f"self_attention.{ours}": (f"linear_attn.{theirs}",) for ours, theirs in names.items()}
    return {**found, "self_attention.in_proj": tuple(f"linear_attn.{name}" for name in projections)}


def delta_values(reading: Reading) -> dict[str, Any]:
    """Return the values of our flags of such a decoder, but for its MLP or experts."""
    every = reading.integer(_INTERVAL, 4)
    usual = [(number + 1) % every != 0 for number in layer_numbers(reading)]
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
    kinds, number = reading.get("layer_types"), len(usual)
    has_rule = usual
    if isinstance(kinds, list) and len(kinds) == number and {*map(str, kinds)} <= {*RULE_KINDS}:
        has_rule = [kind == RULE_KINDS[1] for kind in kinds]
    elif kinds is not None:
        reading.problems.append(
            f"layer_types is {json.dumps(kinds)[:80]}; supported is a list of num_hidden_layers {number} times "
            f"{' or '.join(RULE_KINDS)}"
        )
    return {
        "experimental_attention_variant": variant if any(has_rule) else None,
        "linear_attention_freq": pattern(has_rule) if any(has_rule) else None,
    }


def without_axes(reading: Reading) -> Reading:
    """Return the file without how rotary positions of images are divided into three axes: those of a text are one."""
    changed = {}
    for key in ("rope_parameters", "rope_scaling"):
        content = reading.get(key)
        if isinstance(content, dict):
            left = {name: value for name, value in content.items() if not name.startswith("mrope_")}
            changed[key] = left
    return reading.changed(**changed)


def delta_json(config: Config) -> dict[str, Any]:
    """Return the content of `config.json` of such a decoder, but for its MLP or experts."""
    return {
        **decoder_json(config, partial=True, biases="attention"),
        "layer_types": [RULE_KINDS[not one.has_attention] for one in layers(config)[: config.model.num_layers]],
        **{name: getattr(config.model, name) for name in RULE_SIZES},
    }


def shared_width(model: ModelConfig) -> int:
    """Return the width of the shared expert, which is in every model with experts."""
    return model.moe_shared_expert_intermediate_size or model.expert_ffn_hidden_size


def shared_expert(model: ModelConfig) -> dict[str, Any]:
    """Return that there is one, and that either all matrices of attention have biases or none has
    (`Family.dependent_flags`)."""
    return {**biases_of_attention(model), "moe_shared_expert_intermediate_size": shared_width(model)}
