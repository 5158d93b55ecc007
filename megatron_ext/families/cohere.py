"""Cohere's models: Command R, R+, R7B and A."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.parts.attention.describe import attention_of
from megatron_ext.parts.stack import final_norm


# Command R: attention and MLP in parallel through one norm without bias, neighbouring channels rotated together, and
# a factor of the logits; in Command R+ norms of queries and keys with weights of each head.
def _dependent_flags_cohere(model: ModelConfig) -> dict[str, Any]:
    return {**shared.biases_of_attention(model), **shared.norms_of_heads(model)}


COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    shared.DECODER_NAMES,
    {
        **{**shared.DECODER_FLAGS, "normalization": "LayerNorm", "norm_parameters": "weight"},
        **{"rotary_interleaved": True, "parallel_residual": "one-norm", "disable_bias_linear": True},
    },
    *shared.keys(
        shared.understood("model_max_length"),  # of the tokenizer
        shared.decoder(epsilon="layer_norm_eps", biases="attention"),
        shared.number("logit_scale", "logits_multiplier", 0.0625),
        shared.head_norms("use_qk_norm"),
    ),
    {
        **{"layer_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
        "max_position_embeddings": 8192,
    },
    dependent_flags=_dependent_flags_cohere,
)


# Command R7B and Command A: Command R with windows in three of four layers; the layers without one rotate nothing.
_BLOCK = {  # in published files; transformers does not read it
    **{"order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0},
    **{"use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True},
}


def _read_cohere2(reading: Reading) -> dict[str, Any]:
    every = reading.integer("sliding_window_pattern", 4)
    shared.refuse_others(reading, {**_BLOCK, "layer_switch": every})
    reading.understand("use_parallel_embedding")
    has_window = shared.typed_windows(reading, shared.all_but_every(reading, every))
    windows = shared.layer_window_values(reading, has_window)
    return {**COHERE.read(reading), **windows, "no_rope_freq": _fixed(has_window)}


def _fixed(has_window: Iterable[bool]) -> str | None:
    fixed = [not one for one in has_window]
    return shared.pattern(fixed) if any(fixed) else None


def _write_cohere2(config: Config) -> dict[str, Any]:
    return {**COHERE.write(config), **shared.typed_window_json(config)}


def _dependent_flags_cohere2(model: ModelConfig) -> dict[str, Any]:
    attentions = [attention_of(model, final_norm(model), number) for number in range(model.num_layers)]
    fixed = _fixed(attention.window is not None for attention in attentions)
    return {**COHERE.dependent_flags(model), "no_rope_freq": fixed}


COHERE2 = replace(
    COHERE,
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    read=_read_cohere2,
    write=_write_cohere2,
    defaults={**COHERE.defaults, "rope_theta": 10000.0, "sliding_window": 4096},
    dependent_flags=_dependent_flags_cohere2,
)
