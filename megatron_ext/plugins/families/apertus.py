"""Apertus: `--xielu`, whose two numbers each layer learns; norms of queries and keys."""

from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family

_NAMES = {
    "input_layernorm": ("attention_layernorm",),
    "pre_mlp_layernorm": ("feedforward_layernorm",),
    "mlp.linear_fc1": ("mlp.up_proj",),
    "mlp.xielu": ("mlp.act_fn",),
}
_SCALING = {
    **{"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "original_max_position_embeddings": 8192},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


APERTUS = Family(
    "apertus",
    "ApertusForCausalLM",
    {**shared.DECODER_NAMES, **_NAMES},
    {**shared.DECODER_FLAGS, "swiglu": False, "xielu": True, "qk_layernorm": True},
    *shared.keys(
        shared.usually_scaled(_SCALING, shared.decoder(activation="xielu", biases="attention")), shared.WITHOUT_PADDING
    ),
    {"rms_norm_eps": 1e-5, "rope_theta": 12e6, "max_position_embeddings": 65536},
    dependent_flags=shared.biases_of_attention,
    constants={"mlp.act_fn.beta": 0.5, "mlp.act_fn.eps": -1e-6},
)
