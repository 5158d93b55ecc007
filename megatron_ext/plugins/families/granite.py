"""Granite 3, dense: `--embedding-multiplier`, `--residual-multiplier`, `--logits-multiplier` (1 / `logits_scaling`),
`--softmax-scale` (`attention_multiplier`); biases in all matrices or none."""

from megatron_ext.config.schema import Config
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import (
    DECODER_FLAGS,
    DECODER_NAMES,
    Keys,
    biases_of_attention,
    decoder,
    keys,
    number,
)


def _values(reading: Reading) -> dict[str, float]:
    return {
        "logits_multiplier": 1.0 / max(reading.number("logits_scaling", 1.0), 1e-300),
        "softmax_scale": reading.number("attention_multiplier", 1.0),
    }


def _json(config: Config) -> dict[str, float]:
    model = config.model
    return {
        "logits_scaling": float(f"{1.0 / model.logits_multiplier:.15g}"),  # without the rounding of two inverses
        "attention_multiplier": model.softmax_scale or model.kv_channels**-0.5,
    }


GRANITES: Keys = keys(
    *(number(name, name, 1.0) for name in ("embedding_multiplier", "residual_multiplier")), (_values, _json)
)
"""Granite's factors of embeddings, of residual branches, of products of queries and keys, and of logits."""

GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    DECODER_NAMES,
    DECODER_FLAGS,
    *keys(decoder(biases="all"), GRANITES),
    dependent_flags=biases_of_attention,
    other_names={"granite4_vision_text": {}},
)
