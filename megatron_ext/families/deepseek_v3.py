"""DeepSeek-V3 whose layers all have an MLP: multi-head latent attention, rotated in pairs of neighbours."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import (
    DECODER_FLAGS,
    DECODER_NAMES,
    NEXT_TOKEN_NAMES,
    decoder_json,
    decoder_values,
    scaling_json,
)

_EPSILON = 1e-6
"""Epsilon of the norms of latents, whatever `rms_norm_eps` says of the others."""

_LATENT_NAMES = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}
_OF_ATTENTION = {f"self_attention.{ours}": (f"self_attn.{theirs}",) for ours, theirs in _LATENT_NAMES.items()}
_SIZES = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}
_OF_EXPERTS = (
    *("n_shared_experts", "moe_intermediate_size", "n_group", "topk_group", "topk_method", "scoring_func", "seq_aux"),
    *("num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "moe_layer_freq", "aux_loss_alpha", "ep_size"),
)


def _read(reading: Reading) -> dict[str, Any]:
    values = decoder_values(reading, epsilon=None, scalings=("yarn",))
    values["rope_type"] = values["rope_type"] or "rope"
    values |= {ours: reading.integer(theirs) for theirs, ours in _SIZES.items()}
    ranked = reading.get("q_lora_rank") is not None
    values["q_lora_rank"] = reading.integer("q_lora_rank") if ranked else None
    plain, rotated = values["qk_head_dim"], values["qk_pos_emb_head_dim"]
    values["kv_channels"] = plain + rotated
    for key, size in (("qk_head_dim", plain + rotated), ("head_dim", rotated)):
        reading.refuse_unless(key, size, size, f"but by qk_nope_head_dim and qk_rope_head_dim it is {size}")
    heads, dense = values["num_attention_heads"], reading.integer("first_k_dense_replace", least=0)
    reading.refuse_unless("num_key_value_heads", heads, heads, f"but each of num_attention_heads {heads} has keys")
    reading.refuse_unless("rms_norm_eps", _EPSILON, _EPSILON, f"but norms of latents have {_EPSILON:g}, and others too")
    for key, usual in {"rope_interleave": True, "attention_bias": False, "mlp_bias": False}.items():
        reading.refuse_unless(key, usual, usual, f"only {str(usual).lower()} is supported")
    if dense < values["num_layers"]:
        reading.problems.append(
            f"first_k_dense_replace is {dense} of num_hidden_layers {values['num_layers']}: the other layers have "
            "experts, which is not supported yet; only models whose layers are all dense"
        )
    values["mtp_num_layers"] = reading.integer("num_nextn_predict_layers", 0, least=0) or None
    reading.understand(*_OF_EXPERTS)  # of layers that are not there
    reading.get("n_routed_experts")  # which has two names
    return values


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        **decoder_json(config),
        **{theirs: getattr(model, ours) for theirs, ours in _SIZES.items()},
        "q_lora_rank": model.q_lora_rank,
        "head_dim": model.qk_pos_emb_head_dim,
        "qk_head_dim": model.qk_head_dim + model.qk_pos_emb_head_dim,
        "rms_norm_eps": _EPSILON,
        "attention_bias": False,
        "first_k_dense_replace": model.num_layers,
        **({"num_nextn_predict_layers": model.mtp_num_layers} if model.mtp_num_layers else {}),
    }


def _what_yarn_can_say(model: ModelConfig) -> dict[str, Any]:
    """Return the two mscales, of which transformers reads both or none."""
    read = scaling_json(model) is None or (model.mscale and model.mscale_all_dim)
    return {} if read else {"mscale": 1.0, "mscale_all_dim": 0.0}


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    {**DECODER_NAMES, **_OF_ATTENTION, **NEXT_TOKEN_NAMES},
    {
        **DECODER_FLAGS,
        **{"multi_latent_attention": True, "qk_layernorm": True, "disable_bias_linear": True, "norm_epsilon": _EPSILON},
    },
    _read,
    _write,
    {
        **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"v_head_dim": 128, "first_k_dense_replace": 3, "max_position_embeddings": 4096},
    },
    {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"},
    dependent_flags=_what_yarn_can_say,
    is_common=True,
)
