"""OLMo-2: Llama with norms after attention and MLP, and with norms of queries and keys over all heads of a token."""

from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.families.protocol import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import (
    DECODER_FLAGS,
    DECODER_NAMES,
    decoder_json,
    decoder_values,
    refuse_attention_bias,
)

_BEFORE = ("input_layernorm", "pre_mlp_layernorm")
_NAMES: dict[str, tuple[str, ...]] = {
    **{name: theirs for name, theirs in DECODER_NAMES.items() if name not in _BEFORE},
    "post_self_attn_layernorm": ("post_attention_layernorm",),
    "post_mlp_layernorm": ("post_feedforward_layernorm",),
}


def _read(reading: Reading) -> dict[str, Any]:
    values = decoder_values(reading)
    refuse_attention_bias(reading)
    return values


def _write(config: Config) -> dict[str, Any]:
    return {**decoder_json(config), "attention_bias": not config.model.disable_bias_linear}


OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    _NAMES,
    {
        **DECODER_FLAGS,
        "norm_position": "after",
        "qk_layernorm": True,
        "qk_layernorm_over": "projection",
        "add_qkv_bias": False,
        "disable_bias_linear": True,
    },
    _read,
    _write,
    {"rms_norm_eps": 1e-5},
)
