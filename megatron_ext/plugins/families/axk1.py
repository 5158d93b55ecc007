"""A.X-K1: deepseek_v3 with a norm of what experts and shared ones give together (`--norm-position after-experts`)."""

from megatron_ext.plugins.families import latents
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mixtures import MIXTURE_NAMES, V3_MIXTURE
from megatron_ext.plugins.families.shared import keys

AXK1 = Family(
    "axk1",
    "AXK1ForCausalLM",
    {**MIXTURE_NAMES, **latents.LATENT_NAMES, "post_mlp_layernorm": ("post_mlp_layernorm",)},
    {**latents.LATENT_FLAGS, "norm_position": "after-experts"},
    *keys((latents.latent_values, latents.latent_json), V3_MIXTURE.typed_keys),
    {
        **{**latents.LATENT_DEFAULTS, "max_position_embeddings": 32768, "n_routed_experts": 192, "n_shared_experts": 1},
        **{"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
        **{"routed_scaling_factor": 2.5, "vocab_size": 163840, "hidden_size": 7168, "intermediate_size": 18432},
        **{"num_hidden_layers": 61, "num_attention_heads": 64},
    },
    {"n_routed_experts": "num_local_experts"},
    dependent_flags=lambda model: {**latents.what_latents_can_say(model), **V3_MIXTURE.dependent_flags(model)},
)
