"""Command A+: cohere2 with experts, chosen by a softmax or a sigmoid, next to attention (`--parallel-residual
one-norm`), and shared ones that are added or averaged with them (`--moe-shared-expert-average`); LayerNorm or RMSNorm;
first layers with an MLP of another width, which rotate without a window, too, where
`prefix_dense_sliding_window_pattern` is 1."""

import json
from typing import Any

from megatron_ext.config.derived.layer_patterns import read_pattern
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.attention.describe import attention_of
from megatron_ext.parts.stack import final_norm, layers
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.cohere import COHERE
from megatron_ext.plugins.families.family import EXPERT_BIAS, Family
from megatron_ext.plugins.families.mixtures import (
    MIXTURE_NAMES,
    UNNORMALIZED,
    consecutive_mixtures,
    typed_json,
    typed_mixtures,
)
from megatron_ext.plugins.families.reading import Reading

_NORMS = {"RMSNorm": "rms_norm_eps", "LayerNorm": "layer_norm_eps"}
_CHOICE, _SHARED, _COMBINED = "expert_selection_fn", "num_shared_experts", "shared_expert_combination_strategy"
_EVERY, _EVERY_DENSE = "sliding_window_pattern", "prefix_dense_sliding_window_pattern"
_DENSE_WIDTH = "prefix_dense_intermediate_size"


def _one_of(reading: Reading, key: str, usual: str, other: str) -> bool:
    """Return whether a key has the second of its two values."""
    value = reading.get(key, usual)
    if value not in (usual, other):
        reading.problems.append(f"{key} is {json.dumps(value)[:60]}; supported are {usual} and {other}")
    return value == other


def _read(reading: Reading) -> dict[str, Any]:
    numbers, kind = shared.layer_numbers(reading), "RMSNorm" if reading.get("rms_norm_eps") is not None else "LayerNorm"
    reading.understand("layer_norm_eps")
    named = reading.integer("first_k_dense_replace", 0, least=0)
    first = typed_mixtures(reading, named)
    every, dense = reading.integer(_EVERY, 4), reading.integer(_EVERY_DENSE, 1)
    usual = [(one + 1) % dense != 0 if one < named else (one - named + 1) % every != 0 for one in numbers]
    has_window = shared.typed_windows(reading, usual)
    fixed = [not window and (number >= first or dense != 1) for number, window in zip(numbers, has_window, strict=True)]
    width, count = reading.integer("intermediate_size"), reading.integer(_SHARED, 0, least=0)
    sigmoid, sums = _one_of(reading, _CHOICE, "softmax", "sigmoid"), reading.boolean("norm_topk_prob", True)
    values = shared.decoder_values(reading, epsilon=_NORMS[kind], biases="attention")
    values |= shared.layer_window_values(reading, has_window)
    values |= shared.expert_values(reading, reading.integer("num_experts"), width, normalized=sums or not sigmoid)
    adds = _one_of(reading, _COMBINED, "average", "sum")
    return {
        **{**values, "normalization": kind, "norm_parameters": "weight" if kind == "LayerNorm" else "all"},
        "ffn_hidden_size": reading.integer(_DENSE_WIDTH, width),
        "no_rope_freq": shared.pattern(fixed) if any(fixed) else None,
        **{"moe_router_score_function": "sigmoid" if sigmoid else "softmax", "moe_router_pre_softmax": False},
        UNNORMALIZED: sigmoid and not sums and values["moe_router_topk"] > 1,
        "moe_shared_expert_intermediate_size": count * width or None,
        "moe_shared_expert_average": count > 0 and not adds,
        "moe_layer_freq": shared.pattern([number >= first for number in numbers]) if first else None,
    }


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    held = layers(config)[: model.num_layers]
    content = shared.decoder_json(config, _NORMS[model.normalization], biases="attention")
    rotates = any(one.experts is None and one.attention.window is None and one.attention.rotary for one in held)
    return {
        **{**content, **shared.expert_json(config), **shared.typed_window_json(config), **typed_json(config)},
        **{"intermediate_size": model.expert_ffn_hidden_size, _DENSE_WIDTH: model.ffn_hidden_size},
        **{"num_experts": model.num_experts, _CHOICE: model.moe_router_score_function},
        **{"norm_topk_prob": not model.moe_router_unnormalized, _EVERY_DENSE: 1 if rotates else 2},
        _SHARED: (model.moe_shared_expert_intermediate_size or 0) // model.expert_ffn_hidden_size,
        _COMBINED: "average" if model.moe_shared_expert_average else "sum",
    }


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    has = read_pattern(model.moe_layer_freq, model.num_layers, "the first") if model.moe_layer_freq else [True]
    first, norm = [*has, True].index(True), final_norm(model)
    attentions = [attention_of(model, norm, number) for number in range(model.num_layers)]
    rotates = any(one.window is None and one.rotary is not None for one in attentions[:first])
    fixed = [one.window is None and not (rotates and number < first) for number, one in enumerate(attentions)]
    return {
        **{**shared.biases_of_attention(model), **consecutive_mixtures(model, to_the_end=True)},
        "no_rope_freq": shared.pattern(fixed) if any(fixed) else None,
        "norm_parameters": "weight" if model.normalization == "LayerNorm" else "all",
        "moe_router_pre_softmax": False,
    }


COHERE2_MOE = Family(
    "cohere2_moe",
    "Cohere2MoeForCausalLM",
    {name: theirs for name, theirs in MIXTURE_NAMES.items() if name not in (EXPERT_BIAS, "pre_mlp_layernorm")},
    {name: value for name, value in COHERE.flags.items() if not name.startswith("norm")},
    *shared.keys((_read, _write), shared.number("logit_scale", "logits_multiplier", 0.0625)),
    {
        **{**COHERE.defaults, "rope_theta": 10000.0, "head_dim": 128, "sliding_window": 4096, "num_experts": 8},
        **{"num_experts_per_tok": 2, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40},
        **{"num_attention_heads": 64, "vocab_size": 256000},
    },
    dependent_flags=_dependent_flags,
)
