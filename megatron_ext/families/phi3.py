"""Phi-3 and Phi-4, without longrope: fused matrices, and a share of the channels is rotated."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import shared
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading

_NAMES = {**shared.DECODER_NAMES, shared.QKV: ("self_attn.qkv_proj",), "mlp.linear_fc1": ("mlp.gate_up_proj",)}


def _read(reading: Reading) -> dict[str, Any]:
    values = {**shared.decoder_values(reading, partial=True), **shared.window_values(reading)}
    shared.refuse_others(reading, {"attention_bias": False})  # in the file of Phi-4
    reading.understand("original_max_position_embeddings")  # read with longrope alone
    if values.get("use_rope_scaling"):
        reading.problems.append("rope_type is llama3, which no Phi-3 has; only default is supported")
    return values


def _write(config: Config) -> dict[str, Any]:
    return {**shared.decoder_json(config, partial=True), **shared.NO_PADDING, **shared.window_json(config)}


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    _NAMES,
    {**shared.DECODER_FLAGS, "disable_bias_linear": True, "use_rope_scaling": False},
    _read,
    _write,
    {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
)
