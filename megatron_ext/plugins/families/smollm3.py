"""SmolLM3: some layers rotate nothing (`--no-rope-freq`); windows there or nowhere."""

from typing import Any

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading


def _windows(reading: Reading) -> dict[str, Any]:
    fixed = [not one for one in shared.rotating_layers(reading)]
    return shared.layer_window_values(reading, shared.typed_windows(reading, fixed, switch="use_sliding_window"))


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    shared.DECODER_NAMES,
    shared.DECODER_FLAGS,
    *shared.keys(
        shared.decoder(biases="all"),
        shared.understood("max_window_layers"),  # in published files
        (_windows, shared.switched_window_json),
        shared.FIXED_LAYERS,
        shared.WITHOUT_PADDING,
    ),
    {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True, "max_position_embeddings": 32768},
    dependent_flags=shared.biases_of_attention,
)
