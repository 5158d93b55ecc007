"""Mamba-1: selective scans alone (`--hybrid-layer-pattern SS...`), with biases or without (`--scan-bias`,
`--no-scan-conv-bias`); `intermediate_size` channels where a file has it (`--scan-channels`), and otherwise `expand`
times the hidden size.

The layer is that of Gu and Dao 2023, arXiv:2312.00752.
"""

import math
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.plugins.families import mamba_layers, scan_layers
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading, refuse_others
from megatron_ext.plugins.families.shared import layer_numbers
from megatron_ext.plugins.selective_scan.flags import SelectiveScanFlags

_BEGINNINGS = ("time_step_min", "time_step_max", "time_step_floor", "time_step_scale", "time_step_init_scheme")
_REPEATED = ("d_model", "d_inner", "n_layer", "ssm_cfg", "fused_add_norm", "pad_vocab_size_multiple")
"""Keys of the published files that transformers does not read."""
_KEYS = ("state_size", "conv_kernel", "time_step_rank", "use_bias", "use_conv_bias")


def read_mamba(reading: Reading) -> dict[str, Any]:
    """Return the flags of a model whose layers are Mamba-1 mixers alone, by the keys of its `config.json`."""
    hidden = reading.integer("hidden_size")
    heads = math.gcd(hidden, 64)
    refuse_others(reading, {"hidden_act": "silu", "rms_norm": True})
    reading.understand("residual_in_fp32", "rescale_prenorm_residual", *_BEGINNINGS, *_REPEATED)
    return {
        **scan_layers.scan_values(reading, *_KEYS),
        "scan_channels": reading.integer("intermediate_size", reading.integer("expand", 2) * hidden),
        "num_layers": reading.integer("num_hidden_layers"),
        "hybrid_layer_pattern": "S" * len(layer_numbers(reading)),
        **{"hidden_size": hidden, "norm_epsilon": reading.number("layer_norm_epsilon", 1e-5)},
        "vocab_size": reading.integer("vocab_size"),
        "untie_embeddings_and_output_weights": not reading.boolean("tie_word_embeddings", True),
        # Of attention and MLP, which no layer has.
        **{"ffn_hidden_size": 4 * hidden, "kv_channels": hidden // heads},
        **dict.fromkeys(("num_attention_heads", "num_query_groups"), heads),
    }


def write_mamba(config: Config) -> dict[str, Any]:
    """Return the keys that `read_mamba` reads."""
    model = config.model
    channels = flags_of(model, SelectiveScanFlags).scan_channels or 0
    sizes = {"num_hidden_layers": model.num_layers, "hidden_size": model.hidden_size, "intermediate_size": channels}
    sizes |= {"expand": max(channels // model.hidden_size, 1), "pad_token_id": None}
    return {**sizes, "layer_norm_epsilon": model.norm_epsilon, **scan_layers.scan_json(config, *_KEYS)}


def _dependent(model: ModelConfig) -> dict[str, Any]:
    same = ("group_query_attention", "max_position_embeddings", "swiglu", "squared_relu", "disable_bias_linear")
    return {**{name: getattr(model, name) for name in same}, "hybrid_layer_pattern": "S" * model.num_layers}


MAMBA = Family(
    "mamba",
    "MambaForCausalLM",
    {**mamba_layers.BACKBONE_NAMES, **scan_layers.scan_names("mixer")},
    {"normalization": "RMSNorm", "position_embedding_type": "none", "scan_norm": "none"},
    read_mamba,
    write_mamba,
    {"hidden_size": 768, "num_hidden_layers": 32, "vocab_size": 50280, "tie_word_embeddings": True},
    dependent_flags=_dependent,
    layers="backbone.layers.{}.",
    sections=scan_layers.SCAN_SECTIONS,
    dropouts=(),
    respelled={r"^backbone\.embedding\.": "backbone.embeddings."},
)
