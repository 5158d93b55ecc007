"""Qwen2, Qwen2.5: bias on queries, keys and values; windows from layer `max_window_layers` on, or by `layer_types`."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family

QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "add_qkv_bias": True, "disable_bias_linear": True},
    *shared.keys(shared.decoder(), shared.SWITCHABLE_WINDOWS),
    {"num_key_value_heads": 32, **shared.SWITCHED_WINDOWS},
    is_common=True,
    other_names={"qwen2_vl_text": {}, "qwen2_5_vl_text": {}},
)
