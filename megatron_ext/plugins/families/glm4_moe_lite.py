"""GLM-4.7 Flash: deepseek_v3, with another `rms_norm_eps`."""

from megatron_ext.plugins.families import latents
from megatron_ext.plugins.families.deepseek_v3 import DEEPSEEK_V3
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mixtures import AHEAD, V3_MIXTURE
from megatron_ext.plugins.families.shared import keys

GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    DEEPSEEK_V3.names,
    latents.LATENT_FLAGS,
    *keys((latents.latent_values, latents.latent_json), V3_MIXTURE.typed_keys, AHEAD),
    {
        **{"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
        **{"rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "n_routed_experts": 64, "n_shared_experts": 1},
        **{"num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8},
    },
    {"n_routed_experts": "num_local_experts", "qk_rope_head_dim": "head_dim"},
    dependent_flags=DEEPSEEK_V3.dependent_flags,
    may_be_dense=True,
)
