"""StableLM 2: LayerNorm with SwiGLU, a share of the channels rotated; attention and MLP one after another or in
parallel (`--parallel-residual one-norm`); norms of queries and keys with weights of each head (`qk_layernorm`:
`--qk-layernorm-over each-head`)."""

from typing import Any

from megatron_ext.config.schema import ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import head_norms, keys, switch


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


def _read(reading: Reading) -> dict[str, Any]:
    width = reading.integer("hidden_size") // reading.integer("num_attention_heads")
    reading.refuse_unless(
        "head_dim", width, width, f"but transformers makes it {width}, hidden_size / num_attention_heads"
    )
    return {"parallel_residual": "one-norm" if reading.boolean("use_parallel_residual", False) else "none"}


STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "normalization": "LayerNorm", "disable_bias_linear": True},
    *keys(
        shared.decoder(epsilon="layer_norm_eps", partial=True),
        switch("use_qkv_bias", "add_qkv_bias", False, given="has_qkv_bias"),
        head_norms("qk_layernorm"),
        (
            _read,
            lambda config: {"use_parallel_residual": config.model.parallel_residual != "none"},
        ),
    ),
    {"num_key_value_heads": 32, "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "max_position_embeddings": 4096},
    dependent_flags=_dependent_flags,
    dependent_names=_names,
    vectors="_layernorm.norms.",
    dropouts=("attention_dropout", "hidden_dropout"),
)
