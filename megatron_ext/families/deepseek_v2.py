"""DeepSeek-V2 whose layers all have an MLP: the attention of V3."""

from megatron_ext.families import deepseek_v3 as v3
from megatron_ext.families.protocol import Family

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    v3.DEEPSEEK_V3.names,
    v3.DEEPSEEK_V3.flags,
    v3.DEEPSEEK_V3.read,
    v3.DEEPSEEK_V3.write,
    {**v3.DEEPSEEK_V3.defaults, "first_k_dense_replace": 0, "max_position_embeddings": 2048},
    {"n_routed_experts": "num_experts"},
    dependent_flags=v3.DEEPSEEK_V3.dependent_flags,
)
