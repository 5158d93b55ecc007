"""Granite with windows: granite's factors, a sink that each head learns, `layer_rope_theta`: one base of layers with a
window, one of the others, 0 of layers that rotate nothing."""

import json
from dataclasses import replace
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.cwm import first_of_four_without
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.granite import GRANITE, GRANITES
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.rotary import is_stretched

_BASES = "layer_rope_theta"
_SINKS = {"self_attention.core_attention.softmax_offset": ("self_attn.sinks",)}


def _read(reading: Reading) -> dict[str, Any]:
    """Return windows and bases. A list of all layers gives these, one for those with a window and one for the others,
    and 0 for those that rotate nothing."""
    has_window = shared.typed_windows(reading, first_of_four_without(reading))
    values = {**shared.decoder_values(reading), **shared.layer_window_values(reading, has_window)}
    given, usual = reading.get(_BASES), [values.get("rotary_base", 10000.0)] * len(has_window)
    is_list = isinstance(given, list) and len(given) == len(usual)
    bases = given if is_list and all(type(one) in (int, float) and 0 <= one < 1e300 for one in given) else usual
    of_all, of_windows = (
        {float(base) for base, window in zip(bases, has_window, strict=True) if base and window == kind}
        for kind in (False, True)
    )
    if (given is not None and bases is usual) or len(of_all) > 1 or len(of_windows) > 1 or not any(bases):
        reading.problems.append(
            f"{_BASES} is {json.dumps(given)[:60]}; supported is a list of num_hidden_layers {len(usual)} bases: one "
            "for layers with a window, one for the others, and 0 for some that rotate nothing"
        )
    apart = len(of_all | of_windows) > 1
    if apart and is_stretched(values):
        reading.problems.append(f"{_BASES} has two bases, but rope_scaling or rope_parameters stretch one")
    return {
        **values,
        "rotary_base": next(iter(of_all or of_windows), usual[0]),
        "rotary_base_local": next(iter(of_windows)) if apart and of_windows else None,
        "no_rope_freq": None if all(bases) else shared.pattern([not one for one in bases]),
    }


def _write(config: Config) -> dict[str, Any]:
    rotations = [layer.attention.rotary for layer in layers(config)[: config.model.num_layers]]
    bases = [0 if rotary is None else rotary.base for rotary in rotations]
    return {**shared.decoder_json(config), **shared.typed_window_json(config), _BASES: bases}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    return {**shared.biases_of_attention(model), **({"rotary_base_local": None} if is_stretched(vars(model)) else {})}


def with_windows(family: Family, model_type: str, architecture: str, *of_family: shared.Keys) -> Family:
    """Return a family of Granite, whose keys are `of_family`, with windows and sinks."""
    read, write = shared.keys(*of_family, (_read, _write), GRANITES)
    made = replace(family, model_type=model_type, architecture=architecture, read=read, write=write)
    return replace(
        made,
        names={**family.names, **_SINKS},
        flags={**family.flags, "softmax_type": "learnable"},
        dependent_flags=_dependent_flags,
        other_names={},
    )


GRANITE_SWA = replace(
    with_windows(GRANITE, "granite_swa", "GraniteSWAForCausalLM", shared.decoder(biases="all")),
    defaults={
        **{"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "sliding_window": 128},
        "max_position_embeddings": 8192,
    },
    is_seldom=True,
)
