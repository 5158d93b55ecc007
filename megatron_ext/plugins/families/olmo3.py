"""OLMo-3: OLMo-2 with windows by `layer_types`, default three of four layers; what stretches frequencies (YaRN) is of
the others alone (`--rotary-base-local`)."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.olmo2 import OLMO2
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.rotary import (
    local_base,
    rotary_by_layer,
    rotary_by_layer_json,
    scaled_without_windows,
)


def _read(reading: Reading) -> dict[str, Any]:
    # Next to `rope_parameters` it is the base of all layers or of layers without a window, by transformers' version.
    shared.refuse_others(reading, {"rope_theta": 500000.0})
    windows = shared.layer_window_values(reading, shared.typed_windows(reading, shared.all_but_every(reading, 4)))
    reading, local = rotary_by_layer(reading, 500000.0)
    return local_base({**shared.decoder_values(reading, biases="attention"), **windows, **local})


def _write(config: Config) -> dict[str, Any]:
    return rotary_by_layer_json({**OLMO2.write(config), **shared.typed_window_json(config)}, config.model)


OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    OLMO2.names,
    OLMO2.flags,
    _read,
    _write,
    {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
    dependent_flags=lambda model: {**shared.biases_of_attention(model), **scaled_without_windows(model)},
)
