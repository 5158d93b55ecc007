"""ERNIE 4.5, dense: neighbouring channels are rotated together (`--rotary-interleaved`)."""

from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.shared import DECODER_FLAGS, DECODER_NAMES, decoder, keys, switch

ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    DECODER_NAMES,
    {**DECODER_FLAGS, "rotary_interleaved": True},
    *keys(decoder(), switch("use_bias", "disable_bias_linear", False, negated=True)),
    {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    dropouts=(),
)
