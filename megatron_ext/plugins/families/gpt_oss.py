"""GPT-OSS, bf16: experts with biases, `--quick-geglu` with `--activation-func-clamp-value` and `--glu-linear-offset`,
`--softmax-type learnable`, windows by `layer_types`, YaRN; mxfp4 is read as bf16."""

from typing import Any

from megatron_ext.config.schema import ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family

_YARN = {
    **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "original_max_position_embeddings": 4096,
}
_CLAMP = ("activation_func_clamp_value", 7.0)


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    return {**shared.biased_mlp(model), _CLAMP[0]: model.activation_func_clamp_value or _CLAMP[1]}


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    {**shared.stacked_names("mlp"), "self_attention.core_attention.softmax_offset": ("self_attn.sinks",)},
    {
        **{"position_embedding_type": "rope", "normalization": "RMSNorm", "softmax_type": "learnable"},
        **{"quick_geglu": True, "glu_linear_offset": 1.0, "moe_router_pre_softmax": False},
    },
    *shared.keys(
        shared.understood("initial_context_length"),
        shared.in_one_form({"swiglu_alpha": 1.702}),
        shared.usually_scaled(_YARN, shared.decoder()),
        shared.typed(lambda reading: shared.all_but_every(reading, 2)),
        shared.LOCAL_EXPERTS,
        shared.BIASED_MLP,
        shared.number("swiglu_limit", *_CLAMP),
    ),
    {
        **{"num_hidden_layers": 36, "num_local_experts": 128, "num_experts_per_tok": 4, "hidden_size": 2880},
        **{"intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8},
        **{"vocab_size": 201088, "sliding_window": 128, "rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
        "rope_theta": 150000.0,
    },
    {"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"},
    dependent_flags=_dependent_flags,
    transposed=shared.STACKED_TRANSPOSED,
    alternating=frozenset({"mlp.experts.linear_fc1"}),
)
