"""GPT-OSS: experts with biases, whose gate and up projection take turns in one tensor of all experts, clamped GeGLU,
windows in every second layer, and a sink that each head learns."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading, refuse_others

_OF_EXPERTS = {
    "mlp.router": ("mlp.router",),
    "mlp.experts.linear_fc1.weight": ("mlp.experts.gate_up_proj",),
    "mlp.experts.linear_fc1.bias": ("mlp.experts.gate_up_proj_bias",),
    "mlp.experts.linear_fc2.weight": ("mlp.experts.down_proj",),
    "mlp.experts.linear_fc2.bias": ("mlp.experts.down_proj_bias",),
    "self_attention.core_attention.softmax_offset": ("self_attn.sinks",),
}
_YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}


def _read(reading: Reading) -> dict[str, Any]:
    if not reading.get("rope_parameters") and not reading.get("rope_scaling"):
        reading = reading.changed(rope_parameters=_YARN)
    reading.understand("initial_context_length")  # which transformers does not read
    refuse_others(reading, {"swiglu_alpha": 1.702})
    attention = reading.boolean("attention_bias", True)
    usual = [number % 2 == 0 for number in shared.layer_numbers(reading)]
    experts, width = reading.integer("num_local_experts"), reading.integer("intermediate_size")
    return {
        **shared.decoder_values(reading),
        **shared.layer_window_values(reading, shared.typed_windows(reading, usual)),
        **shared.expert_values(reading, experts, width, normalized=True),
        **shared.bias_flags(attention, attention, True),
        "activation_func_clamp_value": reading.number("swiglu_limit", 7.0),
    }


def _write(config: Config) -> dict[str, Any]:
    model, content = config.model, shared.decoder_json(config)
    return {
        **{**content, "rope_scaling": content["rope_scaling"] or {"rope_type": "default"}},  # for it is YaRN if missing
        **{**shared.typed_window_json(config), **shared.expert_json(config)},
        **{"hidden_act": "silu", "swiglu_limit": model.activation_func_clamp_value},
        **{"num_local_experts": model.num_experts, "intermediate_size": model.expert_ffn_hidden_size},
        "attention_bias": model.has_qkv_bias,
    }


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    clamp = {"activation_func_clamp_value": model.activation_func_clamp_value or 7.0}
    return {**shared.biases_of_attention(model), "add_mlp_bias": model.disable_bias_linear, **clamp}


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    {**{name: theirs for name, theirs in shared.DECODER_NAMES.items() if not name.startswith("mlp.")}, **_OF_EXPERTS},
    {
        **{"position_embedding_type": "rope", "normalization": "RMSNorm", "softmax_type": "learnable"},
        **{"quick_geglu": True, "glu_linear_offset": 1.0, "moe_router_pre_softmax": False},
    },
    _read,
    _write,
    {
        **{"num_hidden_layers": 36, "num_local_experts": 128, "num_experts_per_tok": 4, "hidden_size": 2880},
        **{"intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8},
        **{"vocab_size": 201088, "sliding_window": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        "rope_theta": 150000.0,
    },
    {"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"},
    dependent_flags=_dependent_flags,
    transposed=frozenset(
        f"mlp.experts.{matrix}{kind}" for matrix in ("linear_fc1", "linear_fc2") for kind in ("", ".bias")
    ),
    alternating=frozenset({"mlp.experts.linear_fc1"}),
)
