"""Kolibri: qwen3's attention with norms on both sides; layers without a window rotate nothing; experts in all layers,
chosen by logits with a bias (`--moe-router-bias-of logits`), next to a shared one; their weights may be the scores as
they are (`norm_topk_prob` false: `--moe-router-unnormalized`)."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.cohere2 import fixed_without_windows, windows_alone_rotate
from megatron_ext.plugins.families.family import EXPERT_BIAS, Family
from megatron_ext.plugins.families.mixtures import BIASED_SIGMOID, mixture_names, sigmoid_keys
from megatron_ext.plugins.families.reading import Reading

_WIDTH, _LOCAL = "moe_intermediate_size", "num_local_experts"
_NAMES = {
    **mixture_names("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    **{"post_self_attn_layernorm": ("post_attn_norm",), "post_mlp_layernorm": ("post_ffn_norm",)},
    EXPERT_BIAS: ("moe.router.expert_bias",),
}


def _read(reading: Reading) -> dict[str, Any]:
    sized = reading.changed(intermediate_size=reading.integer(_WIDTH))
    reading.integer("sliding_window")  # without which transformers' class stops
    has_window = shared.typed_windows(reading, shared.all_but_every(reading, 5))
    values = {**shared.decoder_values(sized), **shared.layer_window_values(reading, has_window)}
    return {**values, "no_rope_freq": fixed_without_windows(has_window)}


def _write(config: Config) -> dict[str, Any]:
    content = {**shared.decoder_json(config), **shared.typed_window_json(config)}
    content["sliding_window"] = content["sliding_window"] or 513  # which must be a number
    return {name: value for name, value in content.items() if name != "intermediate_size"}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    return {
        **windows_alone_rotate(model),
        "ffn_hidden_size": model.expert_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": shared.shared_expert_width(model),
    }


KOLIBRI1 = Family(
    "kolibri1",
    "Kolibri1ForCausalLM",
    _NAMES,
    {
        **{**shared.DECODER_FLAGS, **BIASED_SIGMOID, "moe_router_bias_of": "logits", "qk_layernorm": True},
        **{"disable_bias_linear": True, "norm_position": "both"},
    },
    *shared.keys(
        (_read, _write),
        sigmoid_keys("num_experts", _WIDTH),
        shared.size("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    ),
    {
        **{"head_dim": 128, "num_key_value_heads": 4, "num_experts": 384, "num_experts_per_tok": 6},
        **{_WIDTH: 512, "shared_expert_intermediate_size": 512, "sliding_window": 513, "norm_topk_prob": False},
        **{"max_position_embeddings": 262144, "hidden_size": 2560, "num_hidden_layers": 50},
        **{"num_attention_heads": 48, "vocab_size": 128000},
    },
    aliases={"num_experts": _LOCAL},
    dependent_flags=_dependent_flags,
)
