"""Trinity: norms on both sides, a gate of what attention gives, deepseek_v3's experts without groups; layers without a
window rotate nothing."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.cohere2 import fixed_without_windows, windows_alone_rotate
from megatron_ext.plugins.families.family import EXPERT_BIAS, Family
from megatron_ext.plugins.families.mixtures import BIASED_SIGMOID, MIXTURE_NAMES, Mixture
from megatron_ext.plugins.families.reading import Reading

_MIXTURE = Mixture(BIASED_SIGMOID, 2, True, ("n_group", "topk_group", "norm_topk_prob"))
_SCALED, _EVERY = "mup_enabled", "global_attn_every_n_layers"
_PUBLISHED = {"score_func": "sigmoid", "route_norm": True, "num_expert_groups": 1, "num_limited_groups": 1}
_NAMES = {
    shared.QKV: tuple(f"self_attn.{one}_proj" for one in ("q", "gate", "k", "v")),
    "post_self_attn_layernorm": ("post_attention_layernorm",),
    "pre_mlp_layernorm": ("pre_mlp_layernorm",),
    "post_mlp_layernorm": ("post_mlp_layernorm",),
    "mlp.router": ("mlp.router.gate",),
    EXPERT_BIAS: ("mlp.expert_bias",),
}


def _read(reading: Reading) -> dict[str, Any]:
    shared.refuse_others(reading, {**_PUBLISHED, "attention_bias": False})
    reading.understand("load_balance_coeff", "use_grouped_mm")
    has_window = shared.typed_windows(reading, shared.all_but_every(reading, reading.integer(_EVERY, 4)))
    values = {**shared.decoder_values(reading), **shared.layer_window_values(reading, has_window)}
    scaled = reading.boolean(_SCALED, False)
    return {
        **values,
        "no_rope_freq": fixed_without_windows(has_window),
        "embedding_multiplier": values["hidden_size"] ** 0.5 if scaled else 1.0,
    }


def _write(config: Config) -> dict[str, Any]:
    content = {**shared.decoder_json(config), **shared.typed_window_json(config)}
    return {**content, _SCALED: config.model.embedding_multiplier != 1.0}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    scale = model.hidden_size**0.5 if model.embedding_multiplier != 1.0 else 1.0
    return {**_MIXTURE.dependent_flags(model), **windows_alone_rotate(model), "embedding_multiplier": scale}


AFMOE = Family(
    "afmoe",
    "AfmoeForCausalLM",
    {**MIXTURE_NAMES, **_NAMES},
    {
        **{**shared.DECODER_FLAGS, "qk_layernorm": True, "disable_bias_linear": True, "norm_position": "both"},
        "attention_output_gate": True,
    },
    *shared.keys((_read, _write), _MIXTURE.keys),
    {
        **{"head_dim": 128, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 6, "sliding_window": 1024},
        **{"num_shared_experts": 2, "moe_intermediate_size": 1408, "num_dense_layers": 1},
        "max_position_embeddings": 16384,
    },
    renamed={
        **{"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
        **{"routed_scaling_factor": "route_scale", "first_k_dense_replace": "num_dense_layers"},
    },
    dependent_flags=_dependent_flags,
    may_be_dense=True,
    is_seldom=True,
)
