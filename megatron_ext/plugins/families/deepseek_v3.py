"""DeepSeek-V3: multi-head latent attention, and experts chosen by a sigmoid with a bias from groups of them."""

from megatron_ext.plugins.families import latents
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mixtures import AHEAD, MIXTURE_NAMES, V3_MIXTURE
from megatron_ext.plugins.families.shared import NEXT_TOKEN_NAMES, keys

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    {**MIXTURE_NAMES, **latents.LATENT_NAMES, **NEXT_TOKEN_NAMES},
    latents.LATENT_FLAGS,
    *keys((latents.latent_values, latents.latent_json), V3_MIXTURE.keys, AHEAD),
    {
        **{**latents.LATENT_DEFAULTS, "max_position_embeddings": 4096, "n_routed_experts": 256, "n_shared_experts": 1},
        **{"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 2048},
        **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 3},
    },
    {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    dependent_flags=lambda model: {**latents.what_latents_can_say(model), **V3_MIXTURE.dependent_flags(model)},
    is_common=True,
    may_be_dense=True,
    other_names=("kimi_k2",),  # whose files name the same class
    respelled={r"(^|\.)model\.blocks\.": r"\1model.layers."},  # of a Kimi K2.5 that transformers 5.23 has written
)
