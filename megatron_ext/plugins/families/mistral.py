"""Mistral: `sliding_window` w is `--window-size w-1,0`, in all layers."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "disable_bias_linear": True},
    *shared.keys(shared.decoder(), shared.WINDOWS),
    {"num_key_value_heads": 8, "sliding_window": 4096},
    is_common=True,
)
