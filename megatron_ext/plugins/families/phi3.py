"""Phi-3, Phi-3.5, Phi-4, Phi-4-mini: `--rope-type longrope`; queries, keys and values in one matrix, and gate and up
projection; a share of the channels rotated; a window in all layers or none."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.rotary import changed_scaling

_NAMES = {**shared.DECODER_NAMES, shared.QKV: ("self_attn.qkv_proj",), "mlp.linear_fc1": ("mlp.gate_up_proj",)}


def _read(reading: Reading) -> dict[str, Any]:
    original = reading.integer("original_max_position_embeddings", 4096)  # read with longrope alone

    def with_original(key: str, scaling: dict[str, Any]) -> dict[str, Any]:
        if scaling.get("rope_type", scaling.get("type")) not in ("longrope", "su", "yarn"):
            return scaling
        words = f"but transformers takes the {original} next to {key}; say it once, or the same in both"
        inner = Reading(scaling, {})
        inner.refuse_unless("original_max_position_embeddings", original, original, words)
        reading.problems.extend(f"{key}: {problem}" for problem in inner.problems)
        # All three names are one kind.
        named = {name: "longrope" for name in ("rope_type", "type") if name in scaling}
        return {**scaling, **named, "original_max_position_embeddings": original}

    shared.refuse_others(reading, {"attention_bias": False})  # in the file of Phi-4
    scaled = changed_scaling(reading, with_original)
    values = shared.decoder_values(scaled, partial=True, scalings=("longrope",))
    return {**values, **shared.window_values(reading)}


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    content = {**shared.decoder_json(config, partial=True), **shared.NO_PADDING, **shared.window_json(config)}
    if model.rope_type == "longrope":
        content["original_max_position_embeddings"] = model.original_max_position_embeddings
    return content


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    _NAMES,
    {**shared.DECODER_FLAGS, "disable_bias_linear": True},
    _read,
    _write,
    {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    dependent_flags=lambda model: {"rope_type": "longrope" if model.rope_type else None},
    dropouts=("attention_dropout", "resid_pdrop", "embd_pdrop"),
)
