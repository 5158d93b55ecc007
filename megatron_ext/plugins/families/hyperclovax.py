"""HyperCLOVA X SEED Think: granite with norms on both sides or only before, and `logits_scaling` as the factor that it
is; with norms on both sides `residual_multiplier` is 1."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import (
    DECODER_FLAGS,
    DECODER_NAMES,
    biases_of_attention,
    decoder,
    keys,
    number,
)

_NAMES = {"post_self_attn_layernorm": ("post_norm1",), "post_mlp_layernorm": ("post_norm2",)}


def _read(reading: Reading) -> dict[str, Any]:
    scale, both = reading.number_or_none("attention_multiplier"), reading.boolean("use_post_norm", True)
    if both:
        reading.refuse_unless("residual_multiplier", 1.0, 1.0, "only 1 is supported next to use_post_norm")
    return {"softmax_scale": scale, "norm_position": "both" if both else "before"}


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    scale = model.softmax_scale or model.kv_channels**-0.5
    return {"attention_multiplier": scale, "use_post_norm": model.norm_position == "both"}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    either = model.norm_position if model.norm_position in ("both", "before") else "both"
    return {**biases_of_attention(model), "norm_position": either}


HYPERCLOVAX = Family(
    "hyperclovax",
    "HyperCLOVAXForCausalLM",
    {**DECODER_NAMES, **_NAMES},
    DECODER_FLAGS,
    *keys(
        decoder(biases="all"),
        *(number(name, name, 1.0) for name in ("embedding_multiplier", "residual_multiplier")),
        number("logits_scaling", "logits_multiplier", 1.0),
        (_read, _write),
    ),
    dependent_flags=_dependent_flags,
    is_seldom=True,
)
