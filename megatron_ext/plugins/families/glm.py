"""GLM-4 (2024): a share of the channels is rotated (`--rotary-percent`), neighbours together; gate and up projection in
one matrix."""

from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.shared import DECODER_FLAGS, DECODER_NAMES, WITHOUT_PADDING, decoder, keys, switch

_NAMES = {**DECODER_NAMES, "mlp.linear_fc1": ("mlp.gate_up_proj",)}


GLM = Family(
    "glm",
    "GlmForCausalLM",
    _NAMES,
    {**DECODER_FLAGS, "rotary_interleaved": True, "disable_bias_linear": True},
    *keys(
        decoder(partial=True),
        WITHOUT_PADDING,
        switch("attention_bias", "add_qkv_bias", True, given="has_qkv_bias"),
    ),
    {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
    },
)
