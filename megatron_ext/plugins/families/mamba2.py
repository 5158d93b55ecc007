"""Mamba-2: Mamba-2 layers alone (`--hybrid-layer-pattern MM...`); heads have `expand` times the hidden size
channels.

The layer is that of Dao and Gu 2024, arXiv:2405.21060.
"""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import mamba_layers
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.families.shared import layer_numbers

_KEYS = mamba_layers.MambaKeys(
    *("state_size", "head_dim", "n_groups", "num_heads", "conv_kernel", "chunk_size", "expand", "use_conv_bias"),
    *("use_bias", "hidden_act"),
)


def _read(reading: Reading) -> dict[str, Any]:
    values = mamba_layers.mamba_values(reading, _KEYS)
    return {
        **values,
        "num_layers": reading.integer("num_hidden_layers"),
        "hybrid_layer_pattern": "M" * len(layer_numbers(reading)),
        "hidden_size": reading.integer("hidden_size"),
        "norm_epsilon": reading.number("layer_norm_epsilon", 1e-5),
        "vocab_size": reading.integer("vocab_size"),
        "untie_embeddings_and_output_weights": not reading.boolean("tie_word_embeddings", False),
        # Of attention and MLP, which no layer has.
        "ffn_hidden_size": 4 * reading.integer("hidden_size"),
        **dict.fromkeys(("num_attention_heads", "num_query_groups"), values["mamba_num_heads"]),
        "kv_channels": values["mamba_head_dim"],
    }


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    sizes = {"num_hidden_layers": model.num_layers, "hidden_size": model.hidden_size, "pad_token_id": None}
    return {**sizes, "layer_norm_epsilon": model.norm_epsilon, **mamba_layers.mamba_json(config, _KEYS)}


def _dependent(model: ModelConfig) -> dict[str, Any]:
    attention = ("group_query_attention", "max_position_embeddings", "swiglu")
    same = {name: getattr(model, name) for name in (*attention, "squared_relu", "disable_bias_linear")}
    return {**same, **mamba_layers.whole_expansion(model), "hybrid_layer_pattern": "M" * model.num_layers}


MAMBA2 = Family(
    "mamba2",
    "Mamba2ForCausalLM",
    mamba_layers.BACKBONE_NAMES,
    {"normalization": "RMSNorm", "position_embedding_type": "none", "disable_bias_linear": True},
    _read,
    _write,
    {
        **{"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "num_hidden_layers": 64},
        **{"hidden_size": 4096, "vocab_size": 32768},
    },
    dependent_flags=_dependent,
    layers="backbone.layers.{}.",
    sections=mamba_layers.MAMBA_SECTIONS,
    dropouts=(),
)
