"""Shapes of small models of transformers, in which a swapped or mis-sliced tensor shows: by a name, the settings of its
configuration."""

from typing import Any

VOCABULARY = 1003

_DECODER: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "head_dim": 12,
}
_UNTIED = {"tie_word_embeddings": False}
_SCALING: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GPT2: dict[str, Any] = {
    "n_embd": 48,
    "n_inner": 100,
    "n_layer": 2,
    "n_head": 6,
    "vocab_size": VOCABULARY,
    "n_positions": 80,
}

_PLAIN: dict[str, Any] = {
    name: value for name, value in _DECODER.items() if name not in ("num_key_value_heads", "head_dim")
}
_FALCON: dict[str, Any] = {name: value for name, value in _PLAIN.items() if name != "intermediate_size"}

_LATENTS: dict[str, Any] = {
    **{name: value for name, value in _DECODER.items() if name != "head_dim"},
    **{"num_key_value_heads": 6, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"num_hidden_layers": 4, "first_k_dense_replace": 4, "pad_token_id": None},
}
_EXPERTS: dict[str, Any] = {
    **{"n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"n_group": 3, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.7, "first_k_dense_replace": 1},
}
_OF_YOUTU = {name: value for name, value in _LATENTS.items() if name != "first_k_dense_replace"}
_OF_SOLAR: dict[str, Any] = {
    name: value
    for name, value in {**_DECODER, **_EXPERTS}.items()
    if name not in ("intermediate_size", "first_k_dense_replace")
}
_OF_MIMO = {
    **{name: value for name, value in _EXPERTS.items() if name not in ("n_shared_experts", "first_k_dense_replace")},
    **{"num_hidden_layers": 4, "pad_token_id": None},
}
_INDEXER: dict[str, Any] = {"index_n_heads": 10, "index_head_dim": 14, "index_topk": 9}
# Heads whose query and key are nearly at right angles read almost nothing, and their norm divides by that: with the
# types' own epsilon of 1e-6 logits in fp32 with AVX2 were 3.3e-5 off, and gradients 1.0e-5 of their norm.
_DELTA: dict[str, Any] = {
    **{**_DECODER, "num_hidden_layers": 4, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-3},
    **{"linear_key_head_dim": 6, "linear_value_head_dim": 10, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
}
_SHARED_EXPERT: dict[str, Any] = {
    **{"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 40}
}
_NEMOTRON_H: dict[str, Any] = {
    **{"model_type": "nemotron_h", **_DECODER, "ssm_state_size": 6, "mamba_num_heads": 8, "mamba_head_dim": 10},
    **{"n_groups": 2, "time_step_min": 1e-20, "pad_token_id": None, "num_hidden_layers": None, **_UNTIED},
}
_OF_NEMOTRON = {name: value for name, value in _EXPERTS.items() if name != "first_k_dense_replace"}
_GRANITE_4: dict[str, Any] = {
    **{name: value for name, value in _DECODER.items() if name != "head_dim"},
    **{
        "model_type": "granitemoehybrid",
        "mamba_n_heads": 8,
        "mamba_d_state": 6,
        "mamba_n_groups": 2,
        "mamba_d_head": 12,
    },
    **{"shared_intermediate_size": 40, "intermediate_size": 32, "layer_types": ["linear_attention", "full_attention"]},
    **{"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 0.5, "attention_multiplier": 0.3},
    "tie_word_embeddings": True,
}
_FALCON_H1: dict[str, Any] = {
    **{"model_type": "falcon_h1", **_DECODER, "mamba_d_ssm": 56, "mamba_n_heads": 8, "mamba_d_head": 7},
    **{"mamba_n_groups": 2, "mamba_d_state": 6, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7},
    **{"key_multiplier": 0.4, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6, "mlp_multipliers": [0.9, 0.6]},
    **{"ssm_multipliers": [0.35, 0.8, 1.4, 0.5, 0.9], "embedding_multiplier": 3.0, "lm_head_multiplier": 0.3},
    **{"pad_token_id": None, "rope_theta": 1e11},
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 2": {"model_type": "llama", **_DECODER, "num_key_value_heads": 6, "tie_word_embeddings": False},
    "Llama 3.1": {
        "model_type": "llama",
        **_DECODER,
        "num_hidden_layers": 4,  # more than stages
        "rope_theta": 500000.0,
        "rope_scaling": _SCALING,
        "tie_word_embeddings": False,
    },
    "Llama 3.2": {
        "model_type": "llama",
        **_DECODER,
        "num_key_value_heads": 1,
        "rope_scaling": {**_SCALING, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "Llama with biases": {
        "model_type": "llama",
        **_DECODER,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
    },
    "Llama with biases of attention": {
        **{"model_type": "llama", **_DECODER, "attention_bias": True, "mlp_bias": False}
    },
    "Llama with biases of the MLP": {
        **{"model_type": "llama", **_DECODER, "attention_bias": False, "mlp_bias": True, "num_key_value_heads": 1}
    },
    "Seed-OSS with another bias": {
        **{"model_type": "seed_oss", **_DECODER, "attention_bias": False, "attention_out_bias": True},
        "pad_token_id": None,
    },
    "Qwen3-MoE with biases": {
        **{"model_type": "qwen3_moe", **_DECODER, "moe_intermediate_size": 32, "num_experts": 6},
        **{"num_experts_per_tok": 3, "norm_topk_prob": True, "attention_bias": True},
    },
    "Mistral": {"model_type": "mistral", **_DECODER, "sliding_window": None, "tie_word_embeddings": False},
    "Mistral with a window": {
        **{"model_type": "mistral", **_DECODER, "sliding_window": 5, "tie_word_embeddings": False}
    },
    "Qwen2": {"model_type": "qwen2", **_DECODER, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "Qwen3": {"model_type": "qwen3", **_DECODER, "tie_word_embeddings": False},
    "OLMo-2": {"model_type": "olmo2", **_DECODER, "rope_theta": 500000.0, "tie_word_embeddings": False},
    "Mixtral": {
        "model_type": "mixtral",
        **_DECODER,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "Qwen3-MoE": {
        "model_type": "qwen3_moe",
        **_DECODER,
        "moe_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "Qwen3-MoE with dense layers": {
        **{"model_type": "qwen3_moe", **_DECODER, "num_hidden_layers": 4, "moe_intermediate_size": 32},
        **{"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [0, 3]},
        "tie_word_embeddings": False,
    },
    "Qwen2 with windows": {
        **{"model_type": "qwen2", **_DECODER, "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 7},
        **{"max_window_layers": 1, "tie_word_embeddings": False},
    },
    "Ministral": {
        **{"model_type": "ministral", **_DECODER, "num_hidden_layers": 4, "sliding_window": 6},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    },
    "EXAONE 4.0": {
        **{"model_type": "exaone4", **_DECODER, "head_dim": 8, "num_hidden_layers": 4, "sliding_window": 6},
        "sliding_window_pattern": 2,
    },
    "EXAONE 4.0 without windows": {
        **{"model_type": "exaone4", **_DECODER, "head_dim": 8, "sliding_window": None, "num_key_value_heads": 6},
        "layer_types": ["full_attention"] * 2,
    },
    "SmolLM3": {
        **{"model_type": "smollm3", **_DECODER, "num_hidden_layers": 4, "pad_token_id": None},
        **{"no_rope_layers": [1, 0, 1, 1], "use_sliding_window": True, "sliding_window": 6},
    },
    "Gemma": {"model_type": "gemma", **_DECODER, "num_key_value_heads": 1, "pad_token_id": None, **_UNTIED},
    "Qwen2 with linear scaling": {
        **{"model_type": "qwen2", **_DECODER, "rope_scaling": {"rope_type": "linear", "factor": 3.0}, **_UNTIED}
    },
    "Gemma 2": {
        **{"model_type": "gemma2", **_DECODER, "head_dim": 8, "num_hidden_layers": 4, "sliding_window": 6},
        **{"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 12},
        **{"pad_token_id": None, **_UNTIED},
    },
    "Gemma 3": {
        **{"model_type": "gemma3_text", **_DECODER, "head_dim": 8, "num_hidden_layers": 4, "sliding_window": 6},
        **{"query_pre_attn_scalar": 12, "rope_theta": 1000.0, "rope_local_base_freq": 50.0, "pad_token_id": None},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "num_key_value_heads": 1},
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "Phi-3 with longrope": {
        **{"model_type": "phi3", **_DECODER, "head_dim": 8, "pad_token_id": None, "partial_rotary_factor": 0.75},
        **{"original_max_position_embeddings": 40, "num_key_value_heads": 6},
        "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.5], "long_factor": [1.2, 3.0, 9.0]},
    },
    "Qwen3 with YaRN": {
        **{"model_type": "qwen3", **_DECODER, "num_key_value_heads": 1, **_UNTIED},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16},
            **{"attention_factor": 1.3, "truncate": False},
        },
    },
    "OLMo-3 with YaRN": {
        **{"model_type": "olmo3", **_DECODER, "num_hidden_layers": 4, "sliding_window": 6, "pad_token_id": None},
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16},
    },
    "Llama with a dynamic base": {
        **{"model_type": "llama", **_DECODER, "max_position_embeddings": 62, **_UNTIED},
        "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
    },
    "Apertus": {"model_type": "apertus", **_DECODER, "pad_token_id": None, "num_key_value_heads": 1, **_UNTIED},
    "BLOOM": {"model_type": "bloom", "hidden_size": 48, "n_layer": 2, "n_head": 6, "vocab_size": VOCABULARY, **_UNTIED},
    "MPT": {
        **{"model_type": "mpt", "d_model": 48, "n_layers": 2, "n_heads": 6, "vocab_size": VOCABULARY},
        **{"max_seq_len": 128, "attn_config": {"clip_qkv": 0.4, "softmax_scale": 0.7}},
    },
    "Granite": {
        **{"model_type": "granite", **_DECODER, "head_dim": 8, "embedding_multiplier": 0.3, "logits_scaling": 3.0},
        **{"residual_multiplier": 0.4, "attention_multiplier": 0.2, "tie_word_embeddings": True},
        **{"attention_bias": True, "mlp_bias": True},
    },
    "Hunyuan": {
        **{"model_type": "hunyuan_v1_dense", **_DECODER, "pad_token_id": None},
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0},
    },
    "OLMo": {
        "model_type": "olmo",
        **_DECODER,
        "head_dim": 8,
        "pad_token_id": None,
        "attention_bias": True,
        "clip_qkv": 0.5,
    },
    "OLMo-3": {
        **{"model_type": "olmo3", **_DECODER, "num_hidden_layers": 4, "sliding_window": 6, "pad_token_id": None},
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
    "ERNIE 4.5": {
        "model_type": "ernie4_5",
        **_DECODER,
        "use_bias": True,
        "num_key_value_heads": 1,
        "pad_token_id": None,
    },
    "Seed-OSS": {"model_type": "seed_oss", **_DECODER, "pad_token_id": None},
    "Seed-OSS with biases": {
        **{"model_type": "seed_oss", **_DECODER, "attention_out_bias": True, "mlp_bias": True},
        **{"tie_word_embeddings": True, "pad_token_id": None},
    },
    "GLM": {"model_type": "glm", **_DECODER, "pad_token_id": None, "partial_rotary_factor": 0.5},
    "Phi-3": {
        **{"model_type": "phi3", **_DECODER, "head_dim": 8, "pad_token_id": None, "sliding_window": 9},
        "partial_rotary_factor": 0.75,
    },
    "StarCoder2": {"model_type": "starcoder2", **_DECODER, "head_dim": 8, "sliding_window": 5},
    "StarCoder2 without biases": {
        **{"model_type": "starcoder2", **_DECODER, "use_bias": False, "tie_word_embeddings": False},
        "hidden_act": "gelu",
    },
    "Arcee": {"model_type": "arcee", **_DECODER, "attention_bias": True, "mlp_bias": True},
    "Nemotron": {"model_type": "nemotron", **_DECODER},
    "Nemotron with biases": {
        **{"model_type": "nemotron", **_DECODER, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
        **{"partial_rotary_factor": 1.0, "tie_word_embeddings": True},
    },
    "StableLM": {"model_type": "stablelm", **_DECODER, "head_dim": 8, "use_qkv_bias": True},
    "StableLM, parallel": {
        **{"model_type": "stablelm", **_DECODER, "head_dim": 8, "use_parallel_residual": True, "num_key_value_heads": 1}
    },
    "StableLM, norms of heads": {
        **{"model_type": "stablelm", **_DECODER, "head_dim": 8, "use_parallel_residual": True, "qk_layernorm": True}
    },
    "Phi": {**{"model_type": "phi", **_DECODER, "head_dim": 8, "qk_layernorm": True, **_UNTIED}},
    "Phi, tied": {
        **{"model_type": "phi", **_DECODER, "head_dim": 8, "num_key_value_heads": 1, "partial_rotary_factor": 0.75},
        **{"hidden_act": "gelu", "tie_word_embeddings": True},
    },
    "GPT-NeoX": {"model_type": "gpt_neox", **_PLAIN, "num_hidden_layers": 4, "rotary_pct": 0.5, **_UNTIED},
    "GPT-NeoX, one after another": {
        **{"model_type": "gpt_neox", **_PLAIN, "use_parallel_residual": False, "attention_bias": False},
        **{"rotary_emb_base": 500, "hidden_act": "gelu_new", "tie_word_embeddings": True},
    },
    "Falcon 7B": {"model_type": "falcon", **_FALCON, "bias": True},
    "Falcon 11B": {
        **{"model_type": "falcon", **_FALCON, "new_decoder_architecture": True, "num_kv_heads": 6},
        **{"num_ln_in_parallel_attn": 1, **_UNTIED},
    },
    "Falcon 40B": {
        **{"model_type": "falcon", **_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
        **{"num_hidden_layers": 4, "ffn_hidden_size": 100},
    },
    "Falcon, one after another": {
        **{"model_type": "falcon", **_FALCON, "parallel_attn": False, "multi_query": False, "bias": True}
    },
    "Command R": {
        **{
            "model_type": "cohere",
            **_DECODER,
            "logit_scale": 2.0,
            "pad_token_id": None,
            "attention_bias": True,
            "rope_theta": 700.0,
        }
    },
    "Command R+": {
        **{"model_type": "cohere", **_DECODER, "head_dim": 8, "num_key_value_heads": 1, "pad_token_id": None},
        **{"use_qk_norm": True, "logit_scale": 0.8},
    },
    "Command R7B": {
        **{"model_type": "cohere2", **_DECODER, "head_dim": 8, "num_hidden_layers": 4, "sliding_window": 6},
        **{"sliding_window_pattern": 3, "logit_scale": 2.0, "pad_token_id": None, **_UNTIED},
    },
    "GLM-4": {
        **{"model_type": "glm4", **_DECODER, "pad_token_id": None, "partial_rotary_factor": 0.5},
        "num_hidden_layers": 4,
    },
    "OLMoE": {
        **{"model_type": "olmoe", **_DECODER, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 3},
        **{"norm_topk_prob": True, "pad_token_id": None, "clip_qkv": 0.7},
    },
    "DeepSeek-V3, dense": {
        **{"model_type": "deepseek_v3", **_LATENTS, "q_lora_rank": 20, "tie_word_embeddings": False},
        "rope_scaling": {
            **{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16},
            **{"beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.0},
        },
    },
    "DeepSeek-V2, dense": {"model_type": "deepseek_v2", **_LATENTS, "q_lora_rank": None, "tie_word_embeddings": True},
    "DeepSeek-V3": {
        **{"model_type": "deepseek_v3", **_LATENTS, **_EXPERTS, "q_lora_rank": 20, "first_k_dense_replace": 1},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, **_UNTIED},
    },
    "DeepSeek-V2": {
        **{"model_type": "deepseek_v2", **_LATENTS, **_EXPERTS, "q_lora_rank": None, "first_k_dense_replace": 1},
        **{"topk_method": "group_limited_greedy", "norm_topk_prob": False, **_UNTIED},
    },
    "DeepSeek-V2 without groups": {
        **{"model_type": "deepseek_v2", **_LATENTS, **_EXPERTS, "q_lora_rank": 20, "first_k_dense_replace": 0},
        **{"topk_method": "greedy", "norm_topk_prob": False, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
    },
    "GLM-4.5": {
        **{"model_type": "glm4_moe", **_DECODER, **_EXPERTS, "num_hidden_layers": 4, "attention_bias": True},
        **{"use_qk_norm": True, "partial_rotary_factor": 0.5, "pad_token_id": None, **_UNTIED},
    },
    "GLM-4.5 Air": {
        **{"model_type": "glm4_moe", **_DECODER, **_EXPERTS, "num_hidden_layers": 4, "num_key_value_heads": 1},
        **{"n_group": 1, "topk_group": 1, "partial_rotary_factor": 1.0, "pad_token_id": None},
        **{"first_k_dense_replace": 0, "tie_word_embeddings": True, "head_dim": 8},
    },
    "GLM-4.7 Flash": {
        **{"model_type": "glm4_moe_lite", **_LATENTS, **_EXPERTS, "q_lora_rank": 20, "rms_norm_eps": 1e-3},
        **{"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], **_UNTIED},
    },
    "DeepSeek-V3.2": {
        **{"model_type": "deepseek_v32", **_LATENTS, **_EXPERTS, **_INDEXER, "q_lora_rank": 20, **_UNTIED},
        "rope_scaling": {
            **{"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16},
            **{"beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.0},
        },
    },
    "GLM-5": {
        **{"model_type": "glm_moe_dsa", **_LATENTS, **_EXPERTS, **_INDEXER, "q_lora_rank": 20, "rms_norm_eps": 1e-3},
        **{"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "n_group": 1, "topk_group": 1},
        **{"index_n_heads": 9, "index_head_dim": 8, "index_topk": 7, **_UNTIED},
    },
    "dots.llm1": {
        **{"model_type": "dots1", **_DECODER, **_EXPERTS, "num_hidden_layers": 4, "sliding_window": 6},
        **{"max_window_layers": 2, "n_shared_experts": 2, "pad_token_id": None, **_UNTIED},
    },
    "Qwen2-MoE": {
        **{"model_type": "qwen2_moe", **_DECODER, "moe_intermediate_size": 32, "num_experts": 6, **_UNTIED},
        **{"num_experts_per_tok": 3, "norm_topk_prob": False, "shared_expert_intermediate_size": 40},
    },
    "Qwen2-MoE with dense layers and windows": {
        **{"model_type": "qwen2_moe", **_DECODER, "num_hidden_layers": 4, "moe_intermediate_size": 32},
        **{"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True, "shared_expert_intermediate_size": 24},
        **{"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 3},
        **{"qkv_bias": False, "head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
    },
    "ERNIE 4.5 with experts": {
        **{"model_type": "ernie4_5_moe", **_DECODER, "num_hidden_layers": 4, "moe_num_experts": 6, "moe_k": 3},
        **{"moe_intermediate_size": 32, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "pad_token_id": None},
    },
    "ERNIE 4.5 with experts between": {
        **{"model_type": "ernie4_5_moe", **_DECODER, "num_hidden_layers": 4, "moe_num_experts": 6, "moe_k": 2},
        **{"moe_intermediate_size": 32, "moe_num_shared_experts": 0, "moe_layer_start_index": 1, "pad_token_id": None},
        **{"moe_layer_end_index": 2, "num_key_value_heads": 1, **_UNTIED},
    },
    "MiniMax-M2": {
        **{"model_type": "minimax_m2", **_DECODER, "num_local_experts": 6, "num_experts_per_tok": 3},
        **{"rotary_dim": 6, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2},
    },
    "FlexOlmo": {
        **{"model_type": "flex_olmo", **_DECODER, "num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None},
        **{"eos_token_id": 2, "num_key_value_heads": 1},
    },
    "Phi-3.5-MoE": {
        **{"model_type": "phimoe", **_DECODER, "num_local_experts": 6, "router_jitter_noise": 0.2, **_UNTIED},
        **{"head_dim": 8, "attention_bias": True, "lm_head_bias": True, "sliding_window": 7, "pad_token_id": None},
    },
    "Granite with experts": {
        **{"model_type": "granitemoe", **_DECODER, "head_dim": 8, "embedding_multiplier": 0.3, "logits_scaling": 2.0},
        **{"residual_multiplier": 0.4, "attention_multiplier": 0.2, "num_local_experts": 6, "num_experts_per_tok": 3},
        **{"attention_bias": True, "tie_word_embeddings": True},
    },
    "GPT-OSS": {
        **{"model_type": "gpt_oss", **_DECODER, "num_hidden_layers": 4, "sliding_window": 6, **_UNTIED},
        **{"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 32},
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False},
    },
    "GPT-OSS without biases of attention": {
        **{"model_type": "gpt_oss", **_DECODER, "num_hidden_layers": 4, "sliding_window": 5, "attention_bias": False},
        **{"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20, "num_key_value_heads": 1},
        **{"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]},
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "swiglu_limit": 0.5},
    },
    "MiMo-V2-Flash": {
        **{"model_type": "mimo_v2_flash", **_DECODER, **_OF_MIMO, "num_key_value_heads": 1, "v_head_dim": 10},
        **{"n_group": 1, "topk_group": 1, "sliding_window": 6, **_UNTIED},
    },
    "MiMo-V2-Flash with wide values": {
        **{"model_type": "mimo_v2_flash", **_DECODER, **_OF_MIMO, "num_attention_heads": 8, "v_head_dim": 14},
        **{"head_dim": 10, "attention_value_scale": None, "attention_bias": True, "tie_word_embeddings": True},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 700.0},
                "partial_rotary_factor": 0.6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.6},
        },
        "sliding_window": 9,
    },
    "Llama 4": {
        **{"model_type": "llama4_text", **_DECODER, "num_hidden_layers": 4, "intermediate_size": 32, **_UNTIED},
        **{"intermediate_size_mlp": 56, "num_local_experts": 6, "interleave_moe_layer_step": 2, "pad_token_id": None},
        **{"no_rope_layer_interval": 3, "floor_scale": 5, "attn_scale": 0.6, "attention_chunk_size": 64},
        "rope_scaling": {**_SCALING, "high_freq_factor": 1.0},  # as its low one, as in Scout
    },
    "Llama 4 with experts everywhere": {
        **{"model_type": "llama4_text", **_DECODER, "intermediate_size": 24, "num_local_experts": 4},
        **{"no_rope_layers": [1, 1], "attn_temperature_tuning": False, "use_qk_norm": False, "pad_token_id": None},
        **{"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
    },
    "Qwen3-Next": {"model_type": "qwen3_next", **_DELTA, **_SHARED_EXPERT, **_UNTIED},
    "Qwen3-Next with dense layers": {
        **{"model_type": "qwen3_next", **_DELTA, **_SHARED_EXPERT, "mlp_only_layers": [1], "norm_topk_prob": False},
        **{"layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"], "num_key_value_heads": 1},
        **{"linear_conv_kernel_dim": 3, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "head_dim": 8},
        **{"attention_bias": True, "tie_word_embeddings": True},
    },
    "Qwen3.5": {
        **{"model_type": "qwen3_5_text", **_DELTA, "tie_word_embeddings": True},
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
            **{"mrope_section": [1, 1, 1], "mrope_interleaved": True},
        },
    },
    "Qwen3.5 with experts": {**{"model_type": "qwen3_5_moe_text", **_DELTA, **_SHARED_EXPERT, **_UNTIED}},
    "Kimi Linear": {
        **{"model_type": "kimi_linear", **_LATENTS, **_EXPERTS, "linear_head_dim": 6, "linear_num_heads": 4, **_UNTIED},
        **{"layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"], "num_local_experts": 12},
    },
    "Kimi Linear without experts": {
        **{"model_type": "kimi_linear", **_LATENTS, "linear_head_dim": 5, "linear_num_heads": 4, "q_lora_rank": 20},
        **{"mlp_layer_types": ["dense"] * 4, "linear_conv_kernel_dim": 3, **_UNTIED},
        "layer_types": ["full_attention", "linear_attention"] * 2,
    },
    "LFM2": {
        **{"model_type": "lfm2", **_PLAIN, "num_hidden_layers": 4, "num_key_value_heads": 2, "norm_eps": 1e-3},
        **{"layer_types": ["conv", "conv", "full_attention", "conv"], "block_multiple_of": 20, **_UNTIED},
        "pad_token_id": None,
    },
    "LFM2 with biases": {
        **{"model_type": "lfm2", **_PLAIN, "num_hidden_layers": 2, "full_attn_idxs": [0], "conv_L_cache": 5},
        "num_key_value_heads": 2,
        "pad_token_id": None,
        **{"conv_bias": True, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
    },
    "LFM2 with experts": {
        **{"model_type": "lfm2_moe", **_PLAIN, "num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts": 6},
        **{"layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 32, "routed_scaling_factor": 1.7, "tie_word_embeddings": True},
        "pad_token_id": None,
    },
    "LFM2 with experts, unnormalized": {
        **{"model_type": "lfm2_moe", **_PLAIN, "num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts": 6},
        **{"layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 0, "num_experts_per_tok": 3},
        **{"moe_intermediate_size": 24, "norm_topk_prob": False, "use_expert_bias": False, "tie_word_embeddings": True},
        "pad_token_id": None,
    },
    "OLMo hybrid": {
        **{"model_type": "olmo_hybrid", **_DELTA, **_UNTIED, "layer_types": None, "partial_rotary_factor": 1.0},
        **{"pad_token_id": None, "rope_parameters": {"rope_theta": None}},
    },
    "Mamba-2": {
        **{"model_type": "mamba2", "hidden_size": 48, "num_heads": 8, "head_dim": 12, "state_size": 6, "n_groups": 2},
        **{"num_hidden_layers": 4, "vocab_size": VOCABULARY, "pad_token_id": None, "tie_word_embeddings": True},
        "use_cache": False,  # with one transformers 5.23 asks a cache of recurrences alone how long it is, and stops
    },
    "Mamba-2 of one group": {
        **{"model_type": "mamba2", "hidden_size": 48, "num_heads": 32, "head_dim": 3, "state_size": 5, "n_groups": 1},
        **{"num_hidden_layers": 2, "vocab_size": VOCABULARY, "conv_kernel": 3, "chunk_size": 16, **_UNTIED},
        **{"pad_token_id": None, "use_cache": False},
    },
    "Mamba-1": {
        **{"model_type": "mamba", "hidden_size": 48, "state_size": 6, "num_hidden_layers": 4, "vocab_size": VOCABULARY},
        **{"time_step_rank": 5, "pad_token_id": None, "use_bias": True, "tie_word_embeddings": True},
        "initializer_range": 0.2,  # so that it does not write what it reads
    },
    "Mamba-1 of other channels": {
        **{"model_type": "mamba", "hidden_size": 48, "state_size": 5, "num_hidden_layers": 2, "vocab_size": VOCABULARY},
        **{"expand": 1, "conv_kernel": 3, "use_conv_bias": False, "pad_token_id": None, **_UNTIED},
        "intermediate_size": 72,
    },
    "Falcon-Mamba": {
        **{"model_type": "falcon_mamba", "hidden_size": 48, "state_size": 6, "num_hidden_layers": 4},
        **{"vocab_size": VOCABULARY, "pad_token_id": None, "mixer_rms_eps": 1e-4, **_UNTIED},
    },
    "Jamba": {
        **{"model_type": "jamba", **_DECODER, "num_hidden_layers": 4, "head_dim": 8, "mamba_d_state": 6},
        **{"num_experts": 6, "num_experts_per_tok": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
        **{"mamba_dt_rank": 5, "expert_layer_period": 3, "expert_layer_offset": 0, "pad_token_id": None, **_UNTIED},
    },
    "Jamba without experts": {
        **{"model_type": "jamba", **_DECODER, "head_dim": 10, "num_experts": 1, "num_key_value_heads": 1},
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_expand": 1, "mamba_d_conv": 3, "mamba_d_state": 6},
        **{"mamba_proj_bias": True, "mamba_conv_bias": False, "pad_token_id": None, "tie_word_embeddings": True},
        "initializer_range": 0.1,  # so that it does not write what it reads
    },
    "OLMo hybrid with rotation": {
        **{"model_type": "olmo_hybrid", **_DELTA, "num_key_value_heads": 1, "linear_num_value_heads": 4},
        **{"layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"]},
        **{"pad_token_id": None, "partial_rotary_factor": 1.0, "attention_bias": True, "tie_word_embeddings": True},
        **{"linear_allow_neg_eigval": False},
    },
    "Nemotron-H": {**_NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    "Nemotron-H with experts": {
        **{**_NEMOTRON_H, **_OF_NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
        **{"moe_shared_expert_intermediate_size": 40, "n_groups": 4, "num_key_value_heads": 1},
    },
    "Nemotron-H with latents of experts": {
        **{**_NEMOTRON_H, **_OF_NEMOTRON, "layers_block_type": ["moe", "linear_attention", "full_attention", "moe"]},
        **{"moe_shared_expert_intermediate_size": 24, "moe_latent_size": 20},
    },
    "Granite 4": {**_GRANITE_4, "num_local_experts": 0},
    "Granite 4 with experts": {
        **{**_GRANITE_4, "num_local_experts": 6, "num_experts_per_tok": 3, "position_embedding_type": "rope"},
        **{"mamba_n_groups": 2, "mamba_d_head": "auto", "rope_theta": 700.0, "num_key_value_heads": 1, **_UNTIED},
    },
    "Falcon-H1": {**_FALCON_H1, **_UNTIED},
    "Falcon-H1 with norms": {
        **{**_FALCON_H1, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 4},
        **{"num_key_value_heads": 1, "mamba_d_ssm": 40, "mamba_d_head": "auto", "mamba_d_conv": 3},
        **{"tie_word_embeddings": True, "embedding_multiplier": 0.5},
    },
    "Falcon-H1 with norms before gates": {**{**_FALCON_H1, **_UNTIED, "mamba_rms_norm": True, "head_dim": 10}},
    "IQuest-Coder": {"model_type": "iquestcoder", **_DECODER, "attention_bias": True, **_UNTIED},
    "InternLM3": {"model_type": "internlm3", **_DECODER, **_UNTIED},
    "InternLM3 with biases": {
        **{"model_type": "internlm3", **_DECODER, "qkv_bias": True, "bias": True, "tie_word_embeddings": True}
    },
    "Helium": {
        **{"model_type": "helium", **_DECODER, "head_dim": 8, "attention_bias": True, "mlp_bias": True, **_UNTIED},
        "pad_token_id": None,
    },
    "Jais 2": {"model_type": "jais2", **_DECODER, **_UNTIED},
    "Jais 2 with some biases": {"model_type": "jais2", **_DECODER, "mlp_bias": False, "tie_word_embeddings": True},
    "HyperCLOVA X": {
        **{"model_type": "hyperclovax", **_DECODER, "embedding_multiplier": 3.0, "residual_multiplier": 1.0},
        **{"head_dim": 8, "logits_scaling": 0.5, "attention_multiplier": 0.3, **_UNTIED},
    },
    "HyperCLOVA X without norms after": {
        **{"model_type": "hyperclovax", **_DECODER, "use_post_norm": False, "mlp_bias": True, "attention_bias": True},
        "residual_multiplier": 0.7,
    },
    "Code World Model": {
        **{"model_type": "cwm", **_DECODER, "num_hidden_layers": 4, "sliding_window": 7, **_UNTIED},
        "rope_scaling": {**_SCALING, "rope_theta": 700.0},
    },
    "Youtu": {
        **{"model_type": "youtu", **_OF_YOUTU, "q_lora_rank": 20, "tie_word_embeddings": True},
        "initializer_range": 0.02,
    },
    "Solar Open": {
        **{"model_type": "solar_open", **_OF_SOLAR, "attention_bias": True, **_UNTIED},
    },
    "Granite with a shared expert": {
        **{"model_type": "granitemoeshared", **_DECODER, "head_dim": 8, "num_local_experts": 6, "logits_scaling": 2.0},
        **{"num_experts_per_tok": 3, "shared_intermediate_size": 20, "attention_bias": True, **_UNTIED},
    },
    "Granite with windows": {
        **{"model_type": "granite_swa", **_DECODER, "head_dim": 8, "num_hidden_layers": 4, "sliding_window": 6},
        **{"layer_rope_theta": [0, 300.0, 300.0, 300.0], "attention_multiplier": 0.3, "mlp_bias": True, **_UNTIED},
    },
    "Granite with windows, stretched": {
        **{"model_type": "granite_swa", **_DECODER, "head_dim": 8, "layer_types": ["sliding_attention"] * 2},
        **{"sliding_window": 9, "rope_scaling": {**_SCALING, "rope_theta": 700.0}, "tie_word_embeddings": True},
    },
    "Granite with windows and experts": {
        **{"model_type": "granitemoe_swa", **_DECODER, "head_dim": 8, "num_hidden_layers": 4, "sliding_window": 6},
        **{"layer_rope_theta": [700.0, 300.0, 300.0, 0], "num_local_experts": 6, "num_experts_per_tok": 3},
        **{"shared_intermediate_size": 20, "embedding_multiplier": 0.3, "tie_word_embeddings": True},
    },
    "Hy3": {
        **{"model_type": "hy_v3", **_DECODER, "num_hidden_layers": 4, "num_experts": 12, "num_experts_per_tok": 4},
        **{"moe_intermediate_size": 32, "num_shared_experts": 2, "attention_bias": True, **_UNTIED},
    },
    "K-EXAONE": {
        **{"model_type": "exaone_moe", **_DECODER, "num_hidden_layers": 4, "num_experts": 12, "sliding_window": 6},
        **{"num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_group": 3, "topk_group": 2, "pad_token_id": None},
        "tie_word_embeddings": True,
    },
    "AFM with experts": {
        **{"model_type": "afmoe", **_DECODER, "num_hidden_layers": 4, "num_experts": 12, "num_experts_per_tok": 4},
        **{"moe_intermediate_size": 32, "sliding_window": 6, "mup_enabled": True, "route_scale": 1.7, **_UNTIED},
    },
    "AFM without experts": {
        **{"model_type": "afmoe", **_DECODER, "num_dense_layers": 2, "num_key_value_heads": 1, "sliding_window": 9},
        **{"layer_types": ["full_attention", "sliding_attention"], "head_dim": 8, "tie_word_embeddings": True},
    },
    "VaultGemma": {
        **{"model_type": "vaultgemma", **_DECODER, "head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 13},
        **{"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0, "pad_token_id": None, **_UNTIED},
    },
    "Mellum": {
        **{"model_type": "mellum", **_DECODER, "num_experts": 6, "num_experts_per_tok": 3, "num_hidden_layers": 4},
        **{"moe_intermediate_size": 32, "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], **_UNTIED},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6, "norm_topk_prob": False},
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 700.0},
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
    "Hunyuan with experts": {
        **{"model_type": "hunyuan_v1_moe", **_DECODER, "num_experts": 6, "moe_topk": 3, "pad_token_id": None},
        **{"attention_bias": True, "intermediate_size": 32, **_UNTIED},
    },
    "Bamba": {
        **{"model_type": "bamba", **_PLAIN, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_state": 6},
        **{"mamba_n_groups": 2, "attn_layer_indices": [1], "pad_token_id": None, **_UNTIED},
    },
    "GPT-J": {"model_type": "gptj", **_GPT2, "rotary_dim": 4},
    "GPT-J, tied": {
        **{"model_type": "gptj", **_GPT2, "rotary_dim": 8, "n_inner": None, "activation_function": "gelu"},
        "tie_word_embeddings": True,
    },
    "CodeGen": {"model_type": "codegen", **_GPT2, "n_head": 8, "rotary_dim": 4},
    "GPT-Neo": {
        **{"model_type": "gpt_neo", "hidden_size": 48, "num_layers": 4, "num_heads": 6, "vocab_size": VOCABULARY},
        **{"max_position_embeddings": 80, "window_size": 7, "attention_types": [[["global", "local"], 2]]},
    },
    "GPT-BigCode": {"model_type": "gpt_bigcode", **_GPT2},
    "GPT-BigCode with keys of each head": {
        **{"model_type": "gpt_bigcode", **_GPT2, "multi_query": False, "activation_function": "gelu", **_UNTIED},
    },
    "Persimmon": {"model_type": "persimmon", **_PLAIN, **_UNTIED},
    "Persimmon without norms of heads": {
        **{"model_type": "persimmon", **_PLAIN, "qk_layernorm": False, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
    },
    "Ministral 3": {
        **{"model_type": "ministral3", **_DECODER, "pad_token_id": None, **_UNTIED},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 700.0, "factor": 4.0, "original_max_position_embeddings": 16},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        },
    },
    "Ministral 3 with windows": {
        **{"model_type": "ministral3", **_DECODER, "pad_token_id": None, "head_dim": 8, "sliding_window": 7},
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 700.0, "original_max_position_embeddings": 5},
            "llama_4_scaling_beta": 0.5,
        },
    },
    "Aria": {
        **{"model_type": "aria_text", **_DECODER, "moe_num_experts": 6, "moe_topk": 3, "intermediate_size": 32},
        **{"attention_bias": True, "pad_token_id": None, **_UNTIED},
    },
    "Flint": {
        **{"model_type": "flint", **_DECODER, **_SHARED_EXPERT, "num_hidden_layers": 4, "sliding_window": 6},
        **{"mlp_only_layers": [0], "layer_types": ["full_attention", *["sliding_attention"] * 3], **_UNTIED},
    },
    "Flint with biases": {
        **{"model_type": "flint", **_DECODER, **_SHARED_EXPERT, "num_hidden_layers": 4, "sliding_window": 9},
        **{"attention_bias": True, "num_key_value_heads": 1, "norm_topk_prob": False, **_UNTIED},
    },
    "nanochat": {"model_type": "nanochat", **_DECODER, "pad_token_id": None, "rope_theta": 700.0},
    "nanochat with biases": {
        **{"model_type": "nanochat", **_DECODER, "num_key_value_heads": 6, "head_dim": 8, "attention_bias": True},
        **{"final_logit_softcapping": None, "pad_token_id": None},
    },
    "MiniCPM3": {
        **{"model_type": "minicpm3", **_OF_YOUTU, "q_lora_rank": 20, "scale_emb": 3.0, "scale_depth": 1.1},
        **{"dim_model_base": 24, "initializer_range": 0.02, **_UNTIED},
    },
    "MiniCPM3 with longrope": {
        **{"model_type": "minicpm3", **_OF_YOUTU, "scale_emb": 0.3, "initializer_range": 0.02, **_UNTIED},
        "rope_scaling": {
            **{"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.2, 3.0, 9.0, 9.0]},
            **{"original_max_position_embeddings": 40, "factor": 4.0},
        },
    },
    "MiniCPM3 without latents of queries": {
        **{"model_type": "minicpm3", **_OF_YOUTU, "q_lora_rank": None, "v_head_dim": None, "initializer_range": 0.02},
        **{"scale_emb": 0.3, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
    },
    "OPT": {
        **{"model_type": "opt", **_PLAIN, "ffn_dim": 100, "max_position_embeddings": 80, "pad_token_id": None},
        "intermediate_size": None,
    },
    "Galactica": {
        **{"model_type": "opt", **_PLAIN, "ffn_dim": 60, "enable_bias": False, "activation_function": "gelu"},
        **{"layer_norm_elementwise_affine": False, "pad_token_id": None, "intermediate_size": None, **_UNTIED},
    },
    "BioGPT": {"model_type": "biogpt", **_PLAIN, "pad_token_id": None, **_UNTIED},
    "BioGPT without a scale": {
        **{"model_type": "biogpt", **_PLAIN, "pad_token_id": None, "scale_embedding": False, "hidden_act": "gelu_new"},
    },
    "Kolibri": {
        **{"model_type": "kolibri1", **_DECODER, **_SHARED_EXPERT, "num_hidden_layers": 4, "sliding_window": 6},
        **{"layer_types": ["full_attention", *["sliding_attention"] * 3], "intermediate_size": None, **_UNTIED},
    },
    "Kolibri with windows alone": {
        **{"model_type": "kolibri1", **_DECODER, **_SHARED_EXPERT, "layer_types": ["sliding_attention"] * 2},
        **{"sliding_window": 9, "norm_topk_prob": True, "num_key_value_heads": 1, "intermediate_size": None},
    },
    "dots.llm1, unnormalized": {
        **{"model_type": "dots1", **_DECODER, **_EXPERTS, "num_hidden_layers": 4, "max_window_layers": 4},
        **{"norm_topk_prob": False, "pad_token_id": None, **_UNTIED},
    },
    "A.X-K1": {
        **{"model_type": "axk1", **_OF_YOUTU, **_OF_NEMOTRON, "num_key_value_heads": 6, "q_lora_rank": 20},
        **{"n_shared_experts": 2, **_UNTIED},
    },
    "Cohere Compass": {
        **{"model_type": "cohere_compass_text", **_DECODER, "num_hidden_layers": 4},
        **{"layer_types": [*["sliding_attention"] * 3, "full_attention"], "sliding_window": 6, "logit_scale": 0.3},
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0, "mrope_section": [2, 1, 1]},
            "full_attention": None,
        },
        **{"pad_token_id": None, **_UNTIED},
    },
    "Cohere Compass with two bases": {
        **{"model_type": "cohere_compass_text", **_DECODER, "attention_bias": True},
        **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "pad_token_id": None},
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            "full_attention": {
                **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 700.0},
            },
        },
    },
    "Command A+": {
        **{"model_type": "cohere2_moe", **_DECODER, "num_hidden_layers": 4, "num_experts": 6, "intermediate_size": 32},
        **{"num_experts_per_tok": 3, "num_shared_experts": 2, "expert_selection_fn": "sigmoid", "sliding_window": 6},
        **{"mlp_layer_types": ["dense", *["sparse"] * 3], "prefix_dense_intermediate_size": 60, "logit_scale": 0.3},
        **{"layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"], "pad_token_id": None},
        **_UNTIED,
    },
    "Command A+ with RMSNorm": {
        **{"model_type": "cohere2_moe", **_DECODER, "num_hidden_layers": 4, "num_experts": 6, "intermediate_size": 32},
        **{"num_experts_per_tok": 3, "num_shared_experts": 1, "shared_expert_combination_strategy": "sum"},
        **{"rms_norm_eps": 1e-5, "sliding_window": 9, "logit_scale": 0.5, "pad_token_id": None, **_UNTIED},
    },
    "Emu3, its text model": {
        **{"model_type": "emu3_text_model", **_DECODER, "attention_dropout": 0.0},
        "pad_token_id": 1001,  # of which a gradient is left out there; no text has it
    },
    "Granite Vision, its text model": {
        **{"model_type": "granite4_vision_text", **_PLAIN, "num_key_value_heads": 2, "attention_bias": True},
        **{"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3, **_UNTIED},
    },
    "Qwen3-Omni, its text model": {
        **{"model_type": "qwen3_omni_moe_text", **_DECODER, "moe_intermediate_size": 32, "num_experts": 6},
        **{"num_experts_per_tok": 3, "mlp_only_layers": [0], "num_hidden_layers": 4, **_UNTIED},
    },
    "GPT-2": {"model_type": "gpt2", **_GPT2},
    "GPT-2, untied": {"model_type": "gpt2", **_GPT2, "activation_function": "gelu", "tie_word_embeddings": False},
}
