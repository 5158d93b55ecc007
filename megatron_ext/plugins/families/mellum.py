"""Mellum 2: qwen3_moe with windows by `layer_types` and a rotary base of theirs; experts by `mlp_layer_types`."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mixtures import mixtures_by_kind, typed_json
from megatron_ext.plugins.families.qwen3_moe import QWEN3_MOE
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.rotary import (
    local_base,
    rotary_by_layer,
    rotary_by_layer_json,
    scaled_without_windows,
)


def _read(reading: Reading) -> dict[str, Any]:
    # Without effect next to `rope_parameters` of both kinds of layers, which alone transformers reads.
    shared.refuse_others(reading, {"rope_theta": 500000.0, "rope_scaling": None})
    reading.understand("mtp_layer_types", "mtp_mlp_layer_types")  # left out, as in transformers
    if (ahead := reading.integer("num_nextn_predict_layers", 0, least=0)) > 1:
        reading.problems.append(f"num_nextn_predict_layers is {ahead}, above the one that there may be")
    numbers = shared.layer_numbers(reading)
    has_window = shared.typed_windows(reading, [False for _ in numbers])
    shared.window_values(reading)  # which must be a size in any case
    windows = shared.layer_window_values(reading, has_window)
    reading, local = rotary_by_layer(reading, 10000.0)
    values = {**shared.decoder_values(reading, biases="attention"), **windows, **local}
    return {**local_base(values), **mixtures_by_kind(reading, [True for _ in numbers])}


def _write(config: Config) -> dict[str, Any]:
    content = {**shared.decoder_json(config, biases="attention"), **shared.typed_window_json(config)}
    return {**rotary_by_layer_json(content, config.model), **typed_json(config)}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    return {**shared.biases_of_attention(model), **scaled_without_windows(model)}


MELLUM = Family(
    "mellum",
    "MellumForCausalLM",
    QWEN3_MOE.names,
    QWEN3_MOE.flags,
    *shared.keys((_read, _write), shared.experts("num_experts", "moe_intermediate_size", "norm_topk_prob")),
    {
        **{"num_key_value_heads": 4, "head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 896, "norm_topk_prob": True, "sliding_window": 1024, "rope_theta": 500000.0},
        "max_position_embeddings": 131072,
    },
    aliases={"num_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    dependent_flags=_dependent_flags,
    is_seldom=True,
)
