"""SmolLM3: Llama, some of whose layers rotate nothing, with windows there or nowhere."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.parts.stack import layers


def _read(reading: Reading) -> dict[str, Any]:
    reading.understand("max_window_layers")  # in published files; transformers does not read it
    fixed = [not one for one in shared.rotating_layers(reading)]
    windows = shared.layer_window_values(reading, shared.typed_windows(reading, fixed, switch="use_sliding_window"))
    values = {**shared.decoder_values(reading, biases="all"), **windows}
    return {**values, "no_rope_freq": shared.pattern(fixed) if any(fixed) else None}


def _write(config: Config) -> dict[str, Any]:
    rotates = {"no_rope_layers": [int(layer.attention.rotary is not None) for layer in layers(config)]}
    return {
        **shared.decoder_json(config, biases="all"),
        **shared.switched_window_json(config),
        **rotates,
        **shared.NO_PADDING,
    }


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    shared.DECODER_NAMES,
    shared.DECODER_FLAGS,
    _read,
    _write,
    {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True, "max_position_embeddings": 32768},
    dependent_flags=shared.biases_of_attention,
)
