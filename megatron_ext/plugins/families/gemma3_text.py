"""Gemma 3: Gemma 2 with norms of queries and keys; layers with windows have a rotary base of their own
(`--rotary-base-local`), which no scaling stretches."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.gemma2 import GEMMA2
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.rotary import local_base, rotary_by_layer, scaled_without_windows
from megatron_ext.plugins.families.shared import all_but_every, layer_window_values, typed_windows

_LOCAL_BASE, _PATTERN = "rope_local_base_freq", "sliding_window_pattern"
_DEFAULTS = {  # which published files of models of text and images leave out
    **{"rope_theta": 1e6, "max_position_embeddings": 131072, "num_attention_heads": 8, "head_dim": 256},
    **{"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
}


def _read(reading: Reading) -> dict[str, Any]:
    every = reading.integer(_PATTERN, 6)
    reading.understand("cache_implementation", f"_{_PATTERN}")  # of generation; and the same once more
    windows = layer_window_values(reading, typed_windows(reading, all_but_every(reading, every)))
    reading, local = rotary_by_layer(reading, 10000.0, _LOCAL_BASE)
    return local_base({**GEMMA2.read(reading), **windows, **local})


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    return {**GEMMA2.write(config), _LOCAL_BASE: model.rotary_base_local or model.rotary_base}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    return {**GEMMA2.dependent_flags(model), **scaled_without_windows(model)}


GEMMA3_TEXT = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    GEMMA2.names,
    {**GEMMA2.flags, "qk_layernorm": True},
    _read,
    _write,
    {**GEMMA2.defaults, **_DEFAULTS, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    dependent_flags=_dependent_flags,
    added={**GEMMA2.added, "self_attention.q_layernorm": 1.0, "self_attention.k_layernorm": 1.0},
)
