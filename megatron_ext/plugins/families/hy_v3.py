"""Hy3: qwen3's attention, deepseek_v3's experts without groups."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import EXPERT_BIAS, Family
from megatron_ext.plugins.families.mixtures import BIASED_SIGMOID, MIXTURE_NAMES, Mixture

_MIXTURE = Mixture(BIASED_SIGMOID, 2, True, ("n_group", "topk_group", "norm_topk_prob", "first_k_dense_replace"))
_SHARED = "mlp.shared_mlp"

HY_V3 = Family(
    "hy_v3",
    "HYV3ForCausalLM",
    {
        **MIXTURE_NAMES,
        "mlp.router": ("mlp.router.gate",),
        EXPERT_BIAS: ("mlp.expert_bias",),
        "mlp.shared_experts.linear_fc1": (f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"),
        "mlp.shared_experts.linear_fc2": (f"{_SHARED}.down_proj",),
    },
    {**shared.DECODER_FLAGS, "qk_layernorm": True, "disable_bias_linear": True},
    *shared.keys(
        shared.decoder(biases="attention"),
        shared.in_one_form({"mlp_bias": False}),
        shared.understood("enable_moe_fp32_combine"),  # how the same is rounded
        _MIXTURE.typed_keys,
    ),
    {
        **{"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0},
        **{"num_experts": 192, "num_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1536},
        **{"router_scaling_factor": 2.826, "max_position_embeddings": 131072},
    },
    {"num_experts": "num_local_experts"},
    renamed={
        **{"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
        "routed_scaling_factor": "router_scaling_factor",
    },
    dependent_flags=lambda model: {**shared.biases_of_attention(model), **_MIXTURE.dependent_flags(model)},
    may_be_dense=True,
    is_seldom=True,
)
