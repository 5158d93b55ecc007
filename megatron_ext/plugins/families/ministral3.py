"""Ministral 3: mistral stretched by YaRN, whose rotated queries grow with their position (`llama_4_scaling_beta`:
`--attention-temperature-of rotated`)."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.rotary import changed_scaling

_BETA, _ORIGINAL, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings", "max_position_embeddings"
_YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, _ORIGINAL: 16384, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, _BETA: 0.1},
}
_OF_DECODER = shared.keys(shared.decoder(), shared.WINDOWS)


def _read(reading: Reading) -> dict[str, Any]:
    said = reading.section("rope_scaling") or reading.section("rope_parameters") or _YARN
    growth = Reading(said, {_BETA: 0.0})
    scale, step = growth.number_from_0(_BETA), growth.integer(_ORIGINAL, 1 if _BETA not in said else None)
    if _BETA not in said:
        growth.problems.append(f"{_BETA} is missing; 0 stands for queries that do not grow")
    reading.problems += [f"rope_parameters: {problem}" for problem in growth.problems]
    reading = reading if said is not _YARN else reading.changed(rope_parameters=_YARN)

    def rotation(_key: str, content: dict[str, Any]) -> dict[str, Any]:
        """Return `content` without the keys that do not concern rotation: the growth of queries,
        `max_position_embeddings` and, where `rope_type` is default, the original length, which then is the step of the
        growth alone."""
        kind = content.get("rope_type", content.get("type", "default"))
        others = (_BETA, _LENGTH, *([_ORIGINAL] if kind == "default" else []))
        return {name: value for name, value in content.items() if name not in others}

    return {
        **_OF_DECODER[0](changed_scaling(reading, rotation)),
        "attention_temperature_scale": scale or None,
        "attention_temperature_step": float(step),
        "attention_temperature_of": "rotated" if scale else "fixed",
    }


def _write(config: Config) -> dict[str, Any]:
    model, content = config.model, _OF_DECODER[1](config)
    scale = model.attention_temperature_scale
    growth = {_BETA: scale or 0.0, _ORIGINAL: int(model.attention_temperature_step)}
    scaling = content["rope_scaling"] or {"rope_type": "default"}
    return {**content, **shared.NO_PADDING, "rope_scaling": {**growth, **scaling}}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    heated = model.attention_temperature_scale is not None
    stretched = {"attention_temperature_step": float(model.original_max_position_embeddings)}
    return {
        "attention_temperature_of": "rotated" if heated else "fixed",
        **(stretched if heated and model.rope_type == "yarn" else {}),
    }


MINISTRAL3 = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "disable_bias_linear": True},
    _read,
    _write,
    {
        **{"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None},
        **{_LENGTH: 262144, "vocab_size": 131072},
    },
    dependent_flags=_dependent_flags,
    is_seldom=True,
)
