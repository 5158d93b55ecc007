"""Holds what families with DeepSeek's multi-head latent attention have in common: names, flags, and `config.json`."""

from functools import partial
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.rotary import scaling_json
from megatron_ext.plugins.families.shared import DECODER_FLAGS, decoder_json, decoder_values, own_epsilon
from megatron_ext.plugins.latent_attention.flags import LatentAttentionFlags

_epsilon = partial(own_epsilon, "latent_norm_epsilon", 1e-6)

_NAMES = {
    "linear_q_proj": "q_proj",
    "linear_q_down_proj": "q_a_proj",
    "q_layernorm": "q_a_layernorm",
    "linear_q_up_proj": "q_b_proj",
    "linear_kv_down_proj": "kv_a_proj_with_mqa",
    "kv_layernorm": "kv_a_layernorm",
    "linear_kv_up_proj": "kv_b_proj",
    "linear_proj": "o_proj",
}
LATENT_NAMES = {f"self_attention.{ours}": (f"self_attn.{theirs}",) for ours, theirs in _NAMES.items()}
LATENT_FLAGS: dict[str, Any] = {
    **DECODER_FLAGS,
    **{"multi_latent_attention": True, "qk_layernorm": True, "disable_bias_linear": True},
}
LATENT_DEFAULTS: dict[str, Any] = {
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
}
_SIZES = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "v_head_dim": "v_head_dim",
}


def latent_values(reading: Reading, scalings: tuple[str, ...] = ("yarn",)) -> dict[str, Any]:
    """Return the values of our flags of a decoder with latents; `scalings`: what `rope_type` may be, besides
    default."""
    values = decoder_values(reading, scalings=scalings)
    values |= _epsilon(values["norm_epsilon"])
    values["rope_type"] = values.get("rope_type") or "rope"
    values |= {ours: reading.integer(theirs) for theirs, ours in _SIZES.items()}
    ranked = reading.get("q_lora_rank") is not None
    values["q_lora_rank"] = reading.integer("q_lora_rank") if ranked else None
    plain, rotated = values["qk_head_dim"], values["qk_pos_emb_head_dim"]
    values["kv_channels"] = plain + rotated
    for key, size in (("qk_head_dim", plain + rotated), ("head_dim", rotated)):
        reading.refuse_unless(key, size, size, f"but by qk_nope_head_dim and qk_rope_head_dim it is {size}")
    heads = values["num_attention_heads"]
    reading.refuse_unless("num_key_value_heads", heads, heads, f"but each of num_attention_heads {heads} has keys")
    for key, usual in {"rope_interleave": True, "attention_bias": False, "mlp_bias": False}.items():
        reading.refuse_unless(key, usual, usual, f"only {str(usual).lower()} is supported")
    return values


def latent_json(config: Config) -> dict[str, Any]:
    """Return the content of `config.json` of a decoder with latents."""
    model, flags = config.model, flags_of(config.model, LatentAttentionFlags)
    return {
        **decoder_json(config),
        **{theirs: getattr(model, ours) for theirs, ours in _SIZES.items()},
        "q_lora_rank": flags.q_lora_rank,
        "head_dim": flags.qk_pos_emb_head_dim,
        "qk_head_dim": flags.qk_head_dim + flags.qk_pos_emb_head_dim,
        "attention_bias": False,
    }


def what_latents_can_say(model: ModelConfig) -> dict[str, Any]:
    """Return the flags that `config.json` of a model with latents cannot say (`Family.dependent_flags`): the epsilon of
    the latents' norms, and YaRN's two mscales where one is missing or 0, since transformers reads both or none."""
    read = scaling_json(model) is None or (model.mscale and model.mscale_all_dim)
    mscales = {} if read else {"mscale": 1.0, "mscale_all_dim": 0.0}
    return {**mscales, **_epsilon(model.norm_epsilon)}
