"""Phi-1, Phi-1.5, Phi-2: attention and MLP in parallel through one norm, biases everywhere and of the logits
(`--lm-head-bias`), a share of the channels rotated."""

from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.shared import DECODER_FLAGS, DECODER_NAMES, decoder, heads_fill_width, keys, switch

_NAMES = {
    **DECODER_NAMES,
    "self_attention.q_layernorm": ("self_attn.q_layernorm",),
    "self_attention.k_layernorm": ("self_attn.k_layernorm",),
    "self_attention.linear_proj": ("self_attn.dense",),
    "mlp.linear_fc1": ("mlp.fc1",),
    "mlp.linear_fc2": ("mlp.fc2",),
    "decoder.final_layernorm": ("model.final_layernorm",),
}


PHI = Family(
    "phi",
    "PhiForCausalLM",
    _NAMES,
    {
        **{**DECODER_FLAGS, "swiglu": False, "normalization": "LayerNorm"},
        **{"parallel_residual": "one-norm", "lm_head_bias": True},
    },
    *keys(
        decoder(epsilon="layer_norm_eps", activation="gelu_new", partial=True),
        switch("qk_layernorm", "qk_layernorm", False),
    ),
    {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    dependent_flags=heads_fill_width,
    dropouts=("attention_dropout", "resid_pdrop", "embd_pdrop"),
)
