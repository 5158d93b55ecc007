"""Qwen3: norms of queries and keys; windows as in Qwen2."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "qk_layernorm": True, "disable_bias_linear": True},
    *shared.keys(shared.decoder(biases="attention"), shared.SWITCHABLE_WINDOWS),
    {"num_key_value_heads": 32, "head_dim": 128, **shared.SWITCHED_WINDOWS},
    dependent_flags=shared.biases_of_attention,
    other_names={"qwen3_vl_text": {}},
)
