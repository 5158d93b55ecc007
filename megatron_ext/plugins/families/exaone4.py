"""EXAONE 4.0: norms after attention and MLP, and of the heads of queries and keys; next to layers with windows, those
without rotate nothing."""

from typing import Any

from megatron_ext.config.derived.layer_patterns import read_pattern
from megatron_ext.config.schema import ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading


def windows_that_rotate(reading: Reading) -> dict[str, Any]:
    """Return which layers have a window, and that next to these those without one rotate nothing."""
    every = reading.integer("sliding_window_pattern") if reading.get("layer_types") is None else 1
    reading.understand("sliding_window_pattern")
    has_window = shared.typed_windows(reading, shared.all_but_every(reading, every))
    fixed = None
    if reading.get("sliding_window") is not None and not all(has_window):
        fixed = shared.pattern([not one for one in has_window])
    return {**shared.layer_window_values(reading, has_window), "no_rope_freq": fixed}


def others_rotate_nothing(model: ModelConfig) -> dict[str, Any]:
    """Return the flag by which layers without a window rotate nothing where other layers have one
    (`Family.dependent_flags`)."""
    skips = model.window_attn_skip_freq if model.window_size is not None else None
    if skips is None:
        return {"no_rope_freq": None}
    return {"no_rope_freq": shared.pattern([not has_window for has_window in read_pattern(skips, model.num_layers)])}


EXAONE4 = Family(
    "exaone4",
    "Exaone4ForCausalLM",
    shared.NAMES_WITH_NORMS_AFTER,
    {**shared.DECODER_FLAGS, "norm_position": "after", "qk_layernorm": True, "disable_bias_linear": True},
    *shared.keys(shared.decoder(), (windows_that_rotate, shared.typed_window_json)),
    {"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    dependent_flags=others_rotate_nothing,
)
