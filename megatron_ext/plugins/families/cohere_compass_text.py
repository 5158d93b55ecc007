"""Cohere Compass, its text model: cohere that rotates halves of a head, with windows by `layer_types`;
`rope_parameters` of each kind of layers, null for layers that rotate nothing."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.attention.describe import attention_of
from megatron_ext.parts.stack import final_norm, layers
from megatron_ext.plugins.families import rotary, shared
from megatron_ext.plugins.families.cohere import COHERE
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading

_ROTATIONS = "rope_parameters"


def _read(reading: Reading) -> dict[str, Any]:
    has_window = shared.typed_windows(reading, [False for _ in shared.layer_numbers(reading)])
    named = {kind: one for kind, one in reading.section(_ROTATIONS).items() if isinstance(one, dict)}
    named = {kind: {key: one for key, one in said.items() if "mrope" not in key} for kind, said in named.items()}
    kinds = {rotary.KINDS[window] for window in has_window}
    rotated = {kind: named[kind] for kind in rotary.KINDS if kind in kinds & {*named}}
    if not rotated and reading.is_readable:
        reading.problems.append(f"{_ROTATIONS} names none of the layers' kinds {', '.join(sorted(kinds))} that rotates")
    shared.window_values(reading)  # which must be a size in any case
    windows = {**shared.layer_window_values(reading, has_window), "rotary_base_local": None}
    of_all: dict[str, Any] = next(iter(rotated.values()), {})
    sized, local = reading.changed(**{_ROTATIONS: of_all}), {}
    if len(rotated) > 1:
        sized, local = rotary.rotary_by_layer(reading.changed(**{_ROTATIONS: rotated}), 10000.0)
    values = {**shared.decoder_values(sized, epsilon="layer_norm_eps", biases="attention"), **windows, **local}
    fixed = [rotary.KINDS[window] not in rotated for window in has_window]
    values = rotary.local_base(values) if local else values
    return {**values, "no_rope_freq": shared.pattern(fixed) if any(fixed) else None}


def _write(config: Config) -> dict[str, Any]:
    content = {**shared.decoder_json(config, "layer_norm_eps", biases="attention"), **shared.typed_window_json(config)}
    content = rotary.rotary_by_layer_json(content, config.model)
    held = [layer.attention for layer in layers(config)[: config.model.num_layers]]
    rotates = {rotary.KINDS[one.window is not None] for one in held if one.rotary is not None}
    if len(rotates) == 1:
        of_all = content[_ROTATIONS][rotary.KINDS[0]]
        content[_ROTATIONS] = {kind: of_all if kind in rotates else None for kind in rotary.KINDS}
    return content


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    attentions = [attention_of(model, final_norm(model), number) for number in range(model.num_layers)]
    rotates = {one.window is not None for one in attentions if one.rotary is not None}
    fixed = [(one.window is not None) not in rotates for one in attentions]
    return {
        **COHERE.dependent_flags(model),
        "no_rope_freq": shared.pattern(fixed) if any(fixed) else None,
        **(rotary.scaled_without_windows(model) if len(rotates) > 1 else {}),
    }


COHERE_COMPASS_TEXT = Family(
    "cohere_compass_text",
    "CohereCompassForCausalLM",
    shared.DECODER_NAMES,
    {**COHERE.flags, "rotary_interleaved": False},
    *shared.keys((_read, _write), shared.number("logit_scale", "logits_multiplier", 1.0), shared.understood("pooling")),
    {**COHERE.defaults, "sliding_window": 4096, "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528},
    dependent_flags=_dependent_flags,
)
