"""Code World Model: windows in all layers but every fourth from the first, or by `layer_types`."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading

_SCALING = {
    **{"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def first_of_four_without(reading: Reading) -> list[bool]:
    """Return for each layer whether it has a window: all but every fourth, from the first."""
    return [layer % 4 != 0 for layer in shared.layer_numbers(reading)]


CWM = Family(
    "cwm",
    "CwmForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "disable_bias_linear": True},
    *shared.keys(
        shared.usually_scaled(_SCALING, shared.decoder()),
        shared.switch("mlp_bias", "add_mlp_bias", False, given="has_mlp_bias"),
        shared.typed(first_of_four_without),
    ),
    {
        **{"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        **{"rope_theta": 1e6, "sliding_window": 8192},
    },
    is_seldom=True,
)
