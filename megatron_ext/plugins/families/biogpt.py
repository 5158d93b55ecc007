"""BioGPT: opt with GELU, and word embeddings times the square root of the width (`scale_embedding`)."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.opt import LAYER_NAMES, OFFSET, unnormalized
from megatron_ext.plugins.families.reading import Reading

_KEYS = (*shared.PLAIN_KEYS, "layer_norm_eps")
_SCALED = "scale_embedding"


def _read(reading: Reading) -> dict[str, Any]:
    values = unnormalized(shared.plain_values(reading, *_KEYS))
    shared.refuse_others(reading, {"layerdrop": 0.0, "activation_dropout": 0.0})
    return {
        **values,
        **shared.gelu_values(reading, "hidden_act", "gelu"),
        "ffn_hidden_size": reading.integer("intermediate_size", 4096),
        "embedding_multiplier": values["hidden_size"] ** 0.5 if reading.boolean(_SCALED, True) else 1.0,
    }


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    return {
        **{**shared.plain_json(model, *_KEYS), **shared.NO_PADDING, "intermediate_size": model.ffn_hidden_size},
        "hidden_act": "gelu_new" if model.openai_gelu else "gelu",
        _SCALED: model.embedding_multiplier != 1.0,
    }


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    scale = model.hidden_size**0.5 if model.embedding_multiplier != 1.0 else 1.0
    return {**shared.heads_fill_width(model), "embedding_multiplier": scale}


BIOGPT = Family(
    "biogpt",
    "BioGptForCausalLM",
    {
        **{**LAYER_NAMES, "embedding.word_embeddings": ("biogpt.embed_tokens",)},
        **{"embedding.position_embeddings": ("biogpt.embed_positions",), "output_layer": ("output_projection",)},
        "decoder.final_layernorm": ("biogpt.layer_norm",),
    },
    {"norm_epsilon": 1e-5, "position_embedding_offset": OFFSET},
    _read,
    _write,
    {
        **{"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 42384},
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.1),
        "max_position_embeddings": 1024,
    },
    dependent_flags=_dependent_flags,
    layers="biogpt.layers.{}.",
    dropouts=("attention_probs_dropout_prob", "hidden_dropout_prob"),
)
