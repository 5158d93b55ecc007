"""GLM-4.5, 4.6: deepseek_v3's experts; half of the channels rotated, norms of queries and keys or none."""

from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mixtures import AHEAD, MIXTURE_NAMES, V3_MIXTURE
from megatron_ext.plugins.families.shared import DECODER_FLAGS, NEXT_TOKEN_NAMES, decoder, keys, switch

GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    {**MIXTURE_NAMES, **NEXT_TOKEN_NAMES},
    {**DECODER_FLAGS, "disable_bias_linear": True},
    *keys(
        (decoder(partial=True)[0], decoder()[1]),
        V3_MIXTURE.keys,
        AHEAD,
        (lambda reading: {}, lambda config: {"partial_rotary_factor": config.model.rotary_percent}),
        switch("attention_bias", "add_qkv_bias", False, given="has_qkv_bias"),
        switch("use_qk_norm", "qk_layernorm", False),
    ),
    {
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        **{"partial_rotary_factor": 0.5, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 1408, "first_k_dense_replace": 1},
    },
    {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    dependent_flags=V3_MIXTURE.dependent_flags,
    other_names={"glm4v_moe_text": {}},
)
