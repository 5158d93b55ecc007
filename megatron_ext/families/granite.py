"""Granite: Llama with factors of embeddings, of what layers add, of products of queries and keys, and of logits."""

from megatron_ext.config.schema import Config
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.shared import DECODER_FLAGS, DECODER_NAMES, Keys, biases_of_attention, decoder, keys


def granite_values(reading: Reading) -> dict[str, float]:
    """Return the factors of Granite's embeddings, of what layers add, of products of queries and keys, and of
    logits."""
    return {
        "embedding_multiplier": reading.number("embedding_multiplier", 1.0),
        "residual_multiplier": reading.number("residual_multiplier", 1.0),
        "logits_multiplier": 1.0 / max(reading.number("logits_scaling", 1.0), 1e-300),
        "softmax_scale": reading.number("attention_multiplier", 1.0),
    }


def granite_json(config: Config) -> dict[str, float]:
    """Return the keys of `granite_values`."""
    model = config.model
    return {
        "embedding_multiplier": model.embedding_multiplier,
        "residual_multiplier": model.residual_multiplier,
        "logits_scaling": float(f"{1.0 / model.logits_multiplier:.15g}"),  # without the rounding of two inverses
        "attention_multiplier": model.softmax_scale or model.kv_channels**-0.5,
    }


GRANITES: Keys = (granite_values, granite_json)
GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    DECODER_NAMES,
    DECODER_FLAGS,
    *keys(decoder(biases="all"), GRANITES),
    dependent_flags=biases_of_attention,
)
