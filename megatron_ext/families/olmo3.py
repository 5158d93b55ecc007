"""OLMo-3, without YaRN: OLMo-2 whose layers each have a window or none, with one table of angles."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import shared
from megatron_ext.families.olmo2 import OLMO2
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading


def _read(reading: Reading) -> dict[str, Any]:
    # What stands next to `rope_parameters` is of layers without a window alone.
    shared.refuse_others(reading, {"rope_scaling": None, "rope_theta": 500000.0})
    usual = [(number + 1) % 4 != 0 for number in shared.layer_numbers(reading)]
    values = shared.decoder_values(reading, biases="attention")
    return {**values, **shared.layer_window_values(reading, shared.typed_windows(reading, usual))}


def _write(config: Config) -> dict[str, Any]:
    content = {**OLMO2.write(config), **shared.typed_window_json(config)}
    rotary = {"rope_type": "default", "rope_theta": content.pop("rope_theta")}
    return {**content, "rope_parameters": dict.fromkeys(shared.KINDS, rotary)}


OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    OLMO2.names,
    {**OLMO2.flags, "use_rope_scaling": False},
    _read,
    _write,
    {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "sliding_window": 4096},
    dependent_flags=shared.biases_of_attention,
)
