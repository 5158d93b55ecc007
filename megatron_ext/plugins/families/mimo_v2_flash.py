"""MiMo-V2-Flash: layers with a window by `layer_types`, default all but the first and every sixth, with twice
`num_key_value_heads` (`--num-query-groups-local`), sinks (`--softmax-type-local learnable`) and a rotary base of their
own (`--rotary-base-local`); values of `v_head_dim` channels (`--value-channels`) multiplied by `attention_value_scale`
(`--value-multiplier`); a part of each head rotated, experts as in DeepSeek-V3 without shared ones. Keys as transformers
5.23 writes them; those of the first published files, such as `hybrid_layer_pattern`, are refused by name."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import mixtures, shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading, refuse_others
from megatron_ext.plugins.families.rotary import (
    local_base,
    rotary_by_layer,
    rotary_by_layer_json,
    scaled_without_windows,
)

_SHARE = "partial_rotary_factor"
_BASES = dict(zip(shared.KINDS, (5e6, 1e4), strict=True))


def _rotations(reading: Reading) -> dict[str, Any]:
    """Return `rope_parameters` of both kinds of layers, with transformers' defaults for missing keys."""
    given: Any = reading.section("rope_parameters") or {kind: {"rope_theta": base} for kind, base in _BASES.items()}
    if not isinstance(given, dict) or [*map(type, map(given.get, shared.KINDS))] != [dict, dict]:
        reading.problems.append(f"rope_parameters need those of {' and '.join(shared.KINDS)} each")
        return {}
    usual = {kind: 0.334 if given[kind].get("rope_type", "default") == "default" else 1.0 for kind in shared.KINDS}
    return {kind: {**given[kind], _SHARE: given[kind].get(_SHARE, share)} for kind, share in usual.items()}


def _read(reading: Reading) -> dict[str, Any]:
    refuse_others(reading, {"rope_scaling": None, "n_shared_experts": 0})  # which transformers does not read
    before = reading.get("sliding_window_size")  # without a query's own position, in published files
    if before is not None:
        both = reading.integer("sliding_window_size") + 1
        if reading.content.get("sliding_window") not in (None, both):
            reading.problems.append(
                f"sliding_window is {reading.get('sliding_window')}, but by sliding_window_size, which does not count "
                f"the position of a query, it is {both}; keep one of them"
            )
        reading = reading.changed(sliding_window=both)
    usual = [number > 0 and (number + 1) % 6 != 0 for number in shared.layer_numbers(reading)]
    windows = shared.layer_window_values(reading, shared.typed_windows(reading, usual))
    reading, local = rotary_by_layer(reading.changed(rope_parameters=_rotations(reading)), _BASES[shared.KINDS[1]])
    values = {**shared.decoder_values(reading, partial=True), **windows, **local}
    heads, groups, size = values["num_attention_heads"], 2 * values["num_query_groups"], reading.integer("v_head_dim")
    has_windows = values["window_size"] is not None
    if has_windows and heads % groups:
        reading.problems.append(
            f"num_attention_heads {heads} is not divisible by {groups}, twice num_key_value_heads, in layers with a "
            "window"
        )
    return {
        **local_base(values),
        "num_query_groups_local": groups if has_windows else None,
        "softmax_type_local": "learnable" if has_windows else None,
        "value_channels": None if size == values["kv_channels"] else size,
    }


def _write(config: Config) -> dict[str, Any]:
    model, content = config.model, {**shared.decoder_json(config), **shared.typed_window_json(config)}
    content["v_head_dim"] = model.value_channels or model.kv_channels
    return rotary_by_layer_json(content, model, **{_SHARE: model.rotary_percent})


def _mixture_json(config: Config) -> dict[str, Any]:
    left_out = ("first_k_dense_replace", "n_shared_experts")
    return {key: value for key, value in mixtures.V3_MIXTURE.typed_keys[1](config).items() if key not in left_out}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    has_windows = model.window_size is not None
    return {
        **scaled_without_windows(model),
        **mixtures.V3_MIXTURE.dependent_flags(model),
        "moe_shared_expert_intermediate_size": None,
        "num_query_groups_local": 2 * model.num_key_value_heads if has_windows else None,
        "softmax_type_local": "learnable" if has_windows else None,
    }


MIMO_V2_FLASH = Family(
    "mimo_v2_flash",
    "MiMoV2FlashForCausalLM",
    {**mixtures.MIXTURE_NAMES, "self_attention.core_attention.softmax_offset": ("self_attn.attention_sink_bias",)},
    {**shared.DECODER_FLAGS, "disable_bias_linear": True},
    *shared.keys(
        (_read, _write),
        (mixtures.V3_MIXTURE.typed_keys[0], _mixture_json),
        shared.number("attention_value_scale", "value_multiplier", 1.0),
        shared.switch("attention_bias", "add_qkv_bias", False, given="has_qkv_bias"),
    ),
    {
        **{"num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128},
        **{"sliding_window": 129, "attention_value_scale": 0.707, "rms_norm_eps": 1e-5, _SHARE: 0.334},
        **{"hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48, "vocab_size": 152576},
        **{"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
        "max_position_embeddings": 131072,
    },
    {"n_routed_experts": "num_local_experts"},
    dependent_flags=_dependent_flags,
)
