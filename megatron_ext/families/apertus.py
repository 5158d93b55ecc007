"""Apertus: Llama with xIELU, whose numbers each layer learns, and norms of queries and keys."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading

_NAMES = {
    "input_layernorm": ("attention_layernorm",),
    "pre_mlp_layernorm": ("feedforward_layernorm",),
    "mlp.linear_fc1": ("mlp.up_proj",),
    "mlp.xielu": ("mlp.act_fn",),
}
_SCALING = {
    **{"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def _read(reading: Reading) -> dict[str, Any]:
    # What stands next to it is not read where there is neither.
    scaled = reading.get("rope_scaling") or reading.get("rope_parameters")
    reading = reading if scaled else reading.changed(rope_parameters=_SCALING)
    return shared.decoder_values(reading, activation="xielu", biases="attention")


def _write(config: Config) -> dict[str, Any]:
    content = {**shared.decoder_json(config, biases="attention"), **shared.NO_PADDING}
    return {**content, "rope_scaling": content["rope_scaling"] or {"rope_type": "default"}}


APERTUS = Family(
    "apertus",
    "ApertusForCausalLM",
    {**shared.DECODER_NAMES, **_NAMES},
    {**shared.DECODER_FLAGS, "swiglu": False, "xielu": True, "qk_layernorm": True},
    _read,
    _write,
    {"rms_norm_eps": 1e-5, "rope_theta": 12e6, "max_position_embeddings": 65536},
    dependent_flags=shared.biases_of_attention,
    constants={"mlp.act_fn.beta": 0.5, "mlp.act_fn.eps": -1e-6},
)
