"""Bamba: pairs `M-` and, in the layers of `attn_layer_indices`, `*-`; half of the channels rotated."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import mamba_layers, shared
from megatron_ext.plugins.families.falcon_h1 import FALCON_H1
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading, refuse_others

_ATTENTION = "attn_layer_indices"


def _read(reading: Reading) -> dict[str, Any]:
    number = len(shared.layer_numbers(reading))
    named = reading.integers(_ATTENTION, number if reading.is_readable else 10_000)
    refuse_others(reading, {"attention_bias": False, "mlp_bias": False})
    reading.understand("num_logits_to_keep", "z_loss_coefficient")
    values = shared.decoder_values(reading, partial=True)
    if values.pop("rotary_percent", 0.5) != 0.5:
        reading.problems.append("partial_rotary_factor: only 0.5 is supported, which is what transformers takes here")
    return {
        **values,
        **mamba_layers.mamba_values(reading, mamba_layers.MAMBA_KEYS),
        "num_layers": 2 * reading.integer("num_hidden_layers"),
        "hybrid_layer_pattern": "".join("*-" if one in named else "M-" for one in range(number)),
    }


def _write(config: Config) -> dict[str, Any]:
    mixers = (config.model.hybrid_layer_pattern or "")[::2]
    return {
        **{**shared.decoder_json(config), **mamba_layers.mamba_json(config, mamba_layers.MAMBA_KEYS)},
        **{"num_hidden_layers": config.model.num_layers // 2, "partial_rotary_factor": 0.5, **shared.NO_PADDING},
        _ATTENTION: [layer for layer, mixer in enumerate(mixers) if mixer == "*"],
    }


def _dependent(model: ModelConfig) -> dict[str, Any]:
    mixers = (model.hybrid_layer_pattern or "M-" * (model.num_layers // 2))[::2]
    pattern = "".join("*-" if one == "*" else "M-" for one in mixers)
    return {**shared.heads_fill_width(model), **mamba_layers.whole_expansion(model), "hybrid_layer_pattern": pattern}


BAMBA = Family(
    "bamba",
    "BambaForCausalLM",
    {
        **{name: theirs for name, theirs in FALCON_H1.names.items() if "self_attention.mamba." not in name},
        **mamba_layers.mamba_names("mamba"),
    },
    {**FALCON_H1.flags, "rotary_percent": 0.5},
    _read,
    _write,
    {
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "mamba_n_heads": 128, "mamba_d_head": "auto"},
        **{"mamba_n_groups": 1, "mamba_d_state": 256, "partial_rotary_factor": 0.5, "max_position_embeddings": 262144},
    },
    dependent_flags=_dependent,
    halves=True,
    sections=mamba_layers.MAMBA_SECTIONS,
    is_seldom=True,
)
