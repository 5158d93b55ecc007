"""OLMo-2: norms after attention and MLP (`--norm-position after`), and of queries and keys over all heads of a token
(`--qk-layernorm-over projection`)."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family

OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    shared.NAMES_WITH_NORMS_AFTER,
    {
        **shared.DECODER_FLAGS,
        "norm_position": "after",
        "qk_layernorm": True,
        "qk_layernorm_over": "projection",
        "disable_bias_linear": True,
    },
    *shared.decoder(biases="attention"),
    {"rms_norm_eps": 1e-5},
    dependent_flags=shared.biases_of_attention,
)
