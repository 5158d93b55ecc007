"""Qwen3.5, its text model: qwen3_next with an MLP in every layer."""

from megatron_ext.plugins.families import delta_rules, shared
from megatron_ext.plugins.families.family import Family, Sections

_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
QWEN3_5_TEXT = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    {**shared.DECODER_NAMES, **delta_rules.rule_names("linear_attn", in_proj=_PROJECTIONS)},
    {**delta_rules.DELTA_FLAGS, "disable_bias_linear": True},
    *(delta_rules.delta_values, delta_rules.delta_json),
    {
        **{**delta_rules.DELTA_DEFAULTS, "num_key_value_heads": 4, "hidden_size": 4096, "intermediate_size": 12288},
        **{"num_hidden_layers": 32, "vocab_size": 248320},
    },
    dependent_flags=shared.biases_of_attention,
    added=delta_rules.DELTA_ADDED,
    sections={"self_attention.in_proj": Sections((3, 1, 1, 1), by_groups=False), **delta_rules.CONVOLUTION},
)
