"""Command R7B, Command A: cohere with windows in three of four layers, or by `layer_types`; the layers without one
rotate nothing (`--no-rope-freq`)."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.attention.describe import attention_of
from megatron_ext.parts.stack import final_norm
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.cohere import COHERE
from megatron_ext.plugins.families.reading import Reading

_BLOCK = {  # in published files; transformers does not read it
    **{"order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0},
    **{"use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True},
}


def _read(reading: Reading) -> dict[str, Any]:
    every = reading.integer("sliding_window_pattern", 4)
    shared.refuse_others(reading, {**_BLOCK, "layer_switch": every})
    reading.understand("use_parallel_embedding")
    has_window = shared.typed_windows(reading, shared.all_but_every(reading, every))
    windows = shared.layer_window_values(reading, has_window)
    return {**COHERE.read(reading), **windows, "no_rope_freq": fixed_without_windows(has_window)}


def fixed_without_windows(has_window: Iterable[bool]) -> str | None:
    """Return the flag of layers that rotate nothing: all without a window."""
    fixed = [not one for one in has_window]
    return shared.pattern(fixed) if any(fixed) else None


def _write(config: Config) -> dict[str, Any]:
    return {**COHERE.write(config), **shared.typed_window_json(config)}


def windows_alone_rotate(model: ModelConfig) -> dict[str, Any]:
    """Return the flag by which layers without a window rotate nothing (`Family.dependent_flags`)."""
    attentions = [attention_of(model, final_norm(model), number) for number in range(model.num_layers)]
    fixed = fixed_without_windows(attention.window is not None for attention in attentions)
    return {"no_rope_freq": fixed}


COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    read=_read,
    write=_write,
    defaults={**COHERE.defaults, "rope_theta": 10000.0, "sliding_window": 4096},
    dependent_flags=lambda model: {**COHERE.dependent_flags(model), **windows_alone_rotate(model)},
)
