"""Qwen3-Next: qwen2_moe's experts, gated delta rules (`--experimental-attention-variant`) in the layers of
`layer_types`, attention with a gate (`--attention-output-gate`); files of norms hold what they differ from 1; the layer
that predicts a token further ahead (`mtp.`, which transformers leaves out) is read and written with `--mtp-num-layers
1`, as files have it, and left out with 0."""

from typing import Any

from megatron_ext.config.schema import ModelConfig
from megatron_ext.plugins.families import delta_rules
from megatron_ext.plugins.families.family import Family, Sections
from megatron_ext.plugins.families.mixtures import AHEAD, SPARSE_MIXTURE
from megatron_ext.plugins.families.qwen2_moe import QWEN2_MOE
from megatron_ext.plugins.families.shared import keys, size

_SHARED = "shared_expert_intermediate_size"
_AHEAD = {
    **{"eh_proj": ("mtp.fc",), "enorm": ("mtp.pre_fc_norm_embedding",), "hnorm": ("mtp.pre_fc_norm_hidden",)},
    "final_layernorm": ("mtp.norm",),
}
"""Around the layer that predicts the token after the next, which transformers leaves out. Its key is not in published
files, which have one."""


_RULE = delta_rules.rule_names("linear_attn", in_proj=("in_proj_qkvz", "in_proj_ba"))


def _dependent(model: ModelConfig) -> dict[str, Any]:
    return {**delta_rules.shared_expert(model), "mtp_num_layers": 1 if model.mtp_num_layers else model.mtp_num_layers}


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    {**QWEN2_MOE.names, **_RULE, **_AHEAD},
    {**delta_rules.DELTA_FLAGS, "disable_bias_linear": True, "moe_shared_expert_gate": True},
    *keys(
        (delta_rules.delta_values, delta_rules.delta_json),
        SPARSE_MIXTURE,
        size(_SHARED, "moe_shared_expert_intermediate_size"),
        (AHEAD[0], lambda config: {"num_nextn_predict_layers": config.model.mtp_num_layers or 0}),
    ),
    {
        **{**delta_rules.DELTA_DEFAULTS, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10},
        **{"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True},
        **{"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48, "vocab_size": 151936},
        "num_nextn_predict_layers": 1,
    },
    aliases={"num_experts": "num_local_experts"},
    dependent_flags=_dependent,
    added={**delta_rules.DELTA_ADDED, **dict.fromkeys(("enorm", "hnorm", "final_layernorm"), 1.0)},
    ahead="mtp.layers.{}.",
    sections={"self_attention.in_proj": Sections((4, 2), by_groups=True), **delta_rules.CONVOLUTION},
)
