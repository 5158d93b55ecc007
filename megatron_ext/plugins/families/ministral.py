"""Ministral: `layer_types` says which layers have the window (`--window-attn-skip-freq`)."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family

MINISTRAL = Family(
    "ministral",
    "MinistralForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "disable_bias_linear": True},
    *shared.keys(shared.decoder(), shared.typed(lambda reading: [True] * len(shared.layer_numbers(reading)))),
    {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
)
