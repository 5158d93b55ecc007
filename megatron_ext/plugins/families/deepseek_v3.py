"""DeepSeek-V3, Kimi-K2, bf16: `--multi-latent-attention` with or without `--q-lora-rank`, YaRN
(`--rotary-scaling-factor`, `--mscale`), norms of latents with the epsilon 1e-6 (`--latent-norm-epsilon`), whatever
`rms_norm_eps` says of the others; experts chosen by a sigmoid with a bias from `--moe-router-group-topk` of
`--moe-router-num-groups` groups, weights times `--moe-router-topk-scaling-factor`, `first_k_dense_replace` first layers
without experts, or all of them; in deepseek_v3, glm4_moe and glm4_moe_lite `--mtp-num-layers`
(`num_nextn_predict_layers`), as layers after the last one, with their copies of embedding and output layer;
`--mtp-num-layers 0` leaves them out, and so does a folder without them, as transformers writes it."""

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
    other_names={"kimi_k2": {}},  # whose files name the same class
    respelled={r"(^|\.)model\.blocks\.": r"\1model.layers."},  # of a Kimi K2.5 that transformers 5.23 has written
)
