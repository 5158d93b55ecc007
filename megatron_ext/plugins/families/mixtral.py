"""Mixtral: experts; weights are the softmax over the chosen ones; a window in all layers or none."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family

_NAMES = shared.expert_names("block_sparse_moe", gate="w1", up="w3", down="w2")


MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    _NAMES,
    {**shared.DECODER_FLAGS, "disable_bias_linear": True, "moe_router_pre_softmax": False},
    *shared.keys(
        shared.decoder(), shared.WINDOWS, shared.in_one_form({"router_jitter_noise": 0.0}), shared.LOCAL_EXPERTS
    ),
    {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
    },
    aliases={"num_local_experts": "num_experts"},
    is_common=True,
)
