"""Command R, Command R+: parallel through one norm, LayerNorm with a weight alone (`--norm-parameters weight`),
neighbouring channels rotated together, `--logits-multiplier` (`logit_scale`), norms of queries and keys with weights of
each head (`use_qk_norm`: `--qk-layernorm-over each-head`)."""

from typing import Any

from megatron_ext.config.schema import ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.shared import head_norms, keys


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
    *keys(
        shared.understood("model_max_length"),  # of the tokenizer
        shared.decoder(epsilon="layer_norm_eps", biases="attention"),
        shared.number("logit_scale", "logits_multiplier", 0.0625),
        head_norms("use_qk_norm"),
    ),
    {
        **{"layer_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
        "max_position_embeddings": 8192,
    },
    dependent_flags=_dependent_flags,
)
