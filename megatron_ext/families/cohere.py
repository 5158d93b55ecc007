"""Command R: attention and MLP in parallel through one norm without bias, neighbouring channels rotated together, and
a factor of the logits; in Command R+ norms of queries and keys with
weights of each head."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading


def _read(reading: Reading) -> dict[str, Any]:
    reading.understand("model_max_length")  # of the tokenizer
    values = shared.decoder_values(reading, epsilon="layer_norm_eps", biases="attention")
    normed = reading.boolean("use_qk_norm", False)
    norms = {"qk_layernorm": normed, "qk_layernorm_over": "each-head" if normed else "head"}
    return {**values, **norms, "logits_multiplier": reading.number("logit_scale", 0.0625)}


def _write(config: Config) -> dict[str, Any]:
    content = shared.decoder_json(config, "layer_norm_eps", biases="attention")
    return {**content, "logit_scale": config.model.logits_multiplier, "use_qk_norm": config.model.qk_layernorm}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    return {**shared.biases_of_attention(model), **shared.norms_of_heads(model)}


COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    shared.DECODER_NAMES,
    {
        **{**shared.DECODER_FLAGS, "normalization": "LayerNorm", "norm_parameters": "weight"},
        **{"rotary_interleaved": True, "parallel_residual": "one-norm", "disable_bias_linear": True},
    },
    _read,
    _write,
    {
        **{"layer_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
        "max_position_embeddings": 8192,
    },
    dependent_flags=_dependent_flags,
)
