"""Hunyuan, dense: norms of queries and keys after they are rotated (`--qk-layernorm-place after`); `rope_scaling`
dynamic with `alpha` is read as the `--rotary-base` that it stands for."""

from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.shared import DECODER_FLAGS, DECODER_NAMES, biases_of_attention, decoder

_NAMES = {
    **DECODER_NAMES,
    "self_attention.q_layernorm": ("self_attn.query_layernorm",),
    "self_attention.k_layernorm": ("self_attn.key_layernorm",),
}


HUNYUAN = Family(
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    _NAMES,
    {**DECODER_FLAGS, "qk_layernorm": True, "qk_layernorm_place": "after", "disable_bias_linear": True},
    *decoder(alpha=True, biases="attention"),
    {"rms_norm_eps": 1e-5},
    dependent_flags=biases_of_attention,
)
