"""GLM's models, from GLM-4 to GLM-5."""

from dataclasses import replace
from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families import latents, shared
from megatron_ext.families.deepseek import DEEPSEEK_V3, DEEPSEEK_V32
from megatron_ext.families.family import Family
from megatron_ext.families.mixtures import AHEAD, BIASED_MIXTURE, MIXTURE_NAMES
from megatron_ext.families.reading import Reading

# GLM-4 of 2024: a share of the channels is rotated, neighbours together; gate and up projection are one matrix.
_NAMES_GLM = {**shared.DECODER_NAMES, "mlp.linear_fc1": ("mlp.gate_up_proj",)}

GLM = Family(
    "glm",
    "GlmForCausalLM",
    _NAMES_GLM,
    {**shared.DECODER_FLAGS, "rotary_interleaved": True, "disable_bias_linear": True},
    *shared.keys(
        shared.decoder(partial=True),
        shared.WITHOUT_PADDING,
        shared.switch("attention_bias", "add_qkv_bias", True, given="has_qkv_bias"),
    ),
    {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
    },
)


# GLM-4 of 2025 (0414): GLM with norms on both sides of attention and MLP.
_AFTER_GLM4 = {name: (name,) for name in ("post_self_attn_layernorm", "post_mlp_layernorm")}

GLM4 = replace(
    GLM,
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    names={**GLM.names, **_AFTER_GLM4},
    flags={**GLM.flags, "norm_position": "both"},
)


# GLM-4.5 and 4.6: half of each head's channels are rotated, and DeepSeek-V3's experts after dense first layers.
GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    {**MIXTURE_NAMES, **shared.NEXT_TOKEN_NAMES},
    {**shared.DECODER_FLAGS, "disable_bias_linear": True},
    *shared.keys(
        (shared.decoder(partial=True)[0], shared.decoder()[1]),
        BIASED_MIXTURE.keys,
        AHEAD,
        (lambda reading: {}, lambda config: {"partial_rotary_factor": config.model.rotary_percent}),
        shared.switch("attention_bias", "add_qkv_bias", False, given="has_qkv_bias"),
        shared.switch("use_qk_norm", "qk_layernorm", False),
    ),
    {
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        **{"partial_rotary_factor": 0.5, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 1408, "first_k_dense_replace": 1},
    },
    {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    dependent_flags=BIASED_MIXTURE.dependent_flags,
)


# GLM-4.7 Flash: DeepSeek-V3's attention and experts, with another epsilon in the norms of latents.
GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    DEEPSEEK_V3.names,
    latents.LATENT_FLAGS,
    *shared.keys((latents.latent_values, latents.latent_json), BIASED_MIXTURE.typed_keys, AHEAD),
    {
        **{"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256},
        **{"rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "n_routed_experts": 64, "n_shared_experts": 1},
        **{"num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8},
    },
    {"n_routed_experts": "num_local_experts", "qk_rope_head_dim": "head_dim"},
    dependent_flags=DEEPSEEK_V3.dependent_flags,
    may_be_dense=True,
)


# GLM-5: DeepSeek-V3.2's layers, whose indexer rotates neighbouring channels.
def _read_glm_moe_dsa(reading: Reading) -> dict[str, Any]:
    full = ["full"] * len(list(shared.layer_numbers(reading)))
    words = "but layers that take the keys of an earlier layer's choice (arXiv:2603.12201) are not supported"
    reading.refuse_unless("indexer_types", full, full, words)
    reading.refuse_unless("index_topk_freq", 1, 1, words)
    reading.refuse_unless("index_topk_pattern", None, None, words)
    reading.refuse_unless("indexer_rope_interleave", True, True, "only true is supported")
    reading.understand("index_skip_topk_offset")
    return DEEPSEEK_V32.read(reading)


def _write_glm_moe_dsa(config: Config) -> dict[str, Any]:
    return {**DEEPSEEK_V32.write(config), "indexer_types": ["full"] * config.model.num_layers}


GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    read=_read_glm_moe_dsa,
    write=_write_glm_moe_dsa,
    flags={**DEEPSEEK_V32.flags, "dsa_indexer_rope_interleaved": True},
    defaults={
        **{**DEEPSEEK_V32.defaults, "n_group": 1, "topk_group": 1, "q_lora_rank": 2048, "qk_nope_head_dim": 192},
        **{"v_head_dim": 256, "index_n_heads": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752},
    },
)
