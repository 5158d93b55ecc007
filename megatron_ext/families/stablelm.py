"""StableLM: LayerNorm with SwiGLU, a quarter of the channels rotated, biases of queries, keys and values or none, and
attention and MLP one after another or in parallel; in StableLM 2 12B norms of queries and keys with weights of each
head."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading


def _read(reading: Reading) -> dict[str, Any]:
    values = shared.decoder_values(reading, epsilon="layer_norm_eps", partial=True)
    normed = reading.boolean("qk_layernorm", False)
    values |= {"qk_layernorm": normed, "qk_layernorm_over": "each-head" if normed else "head"}
    parallel = "one-norm" if reading.boolean("use_parallel_residual", False) else "none"
    return {**values, "parallel_residual": parallel, "add_qkv_bias": reading.boolean("use_qkv_bias", False)}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    return {
        **shared.heads_fill_width(model),
        **shared.norms_of_heads(model),
        "parallel_residual": "none" if model.parallel_residual == "none" else "one-norm",
    }


def _names(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the names of the norms of queries and keys, a vector for each head."""
    counts = {"q_layernorm": model.num_attention_heads, "k_layernorm": model.num_key_value_heads}
    return {
        f"self_attention.{norm}": tuple(f"self_attn.{norm}.norms.{head}" for head in range(heads))
        for norm, heads in counts.items()
    }


def _write(config: Config) -> dict[str, Any]:
    return {
        **shared.decoder_json(config, "layer_norm_eps", partial=True),
        "use_qkv_bias": config.model.has_qkv_bias,
        "qk_layernorm": config.model.qk_layernorm,
        "use_parallel_residual": config.model.parallel_residual != "none",
    }


STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "normalization": "LayerNorm", "disable_bias_linear": True},
    _read,
    _write,
    {"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
    dependent_flags=_dependent_flags,
    dependent_names=_names,
    vectors="_layernorm.norms.",
)
