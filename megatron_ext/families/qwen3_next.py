"""Qwen3-Next: gated delta rules in three of four layers, attention with gates in the fourth, and experts."""

from megatron_ext.families import delta_rules
from megatron_ext.families.family import Family, Sections
from megatron_ext.families.mixtures import SPARSE_MIXTURE
from megatron_ext.families.qwen2_moe import QWEN2_MOE
from megatron_ext.families.shared import keys, size

_SHARED = "shared_expert_intermediate_size"


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    {**QWEN2_MOE.names, **delta_rules.delta_names("in_proj_qkvz", "in_proj_ba")},
    {**delta_rules.DELTA_FLAGS, "disable_bias_linear": True, "moe_shared_expert_gate": True},
    *keys(
        (delta_rules.delta_values, delta_rules.delta_json),
        SPARSE_MIXTURE,
        size(_SHARED, "moe_shared_expert_intermediate_size"),
    ),
    {
        **{**delta_rules.DELTA_DEFAULTS, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True},
        **{"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48, "vocab_size": 151936},
    },
    aliases={"num_experts": "num_local_experts"},
    dependent_flags=delta_rules.shared_expert,
    added=delta_rules.DELTA_ADDED,
    sections={"self_attention.in_proj": Sections((4, 2), by_groups=True), **delta_rules.CONVOLUTION},
)
