"""OLMo: LayerNorm without parameters (`--norm-parameters none`), `--qkv-clip` (`clip_qkv`)."""

from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.shared import CLIPS, DECODER_FLAGS, DECODER_NAMES, biases_of_attention, decoder, keys

OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    {name: theirs for name, theirs in DECODER_NAMES.items() if "layernorm" not in name},
    {
        **{**DECODER_FLAGS, "normalization": "LayerNorm", "norm_parameters": "none", "norm_epsilon": 1e-5},
        "disable_bias_linear": True,
    },
    *keys(decoder(epsilon=None, biases="attention"), CLIPS),
    dependent_flags=biases_of_attention,
)
