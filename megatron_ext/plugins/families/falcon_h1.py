"""Falcon-H1: pairs of letters `B-`: attention and Mamba-2 side by side on one norm, then an MLP; factors of inputs are
part of `--mamba-multipliers`, `--mixer-multipliers`, `--mlp-multipliers` and `--softmax-scale`, and written as 1; norms
of Mamba-2 by `--mamba-norm`. Biases are refused."""

import json
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.mamba_layers import MAMBA_KEYS, MAMBA_SECTIONS, mamba_json, mamba_names, mamba_values
from megatron_ext.plugins.families.reading import Reading, refuse_others
from megatron_ext.plugins.mamba.flags import MambaFlags
from megatron_ext.plugins.side_by_side.flags import SideBySideFlags

_KEYS = MAMBA_KEYS._replace(fills=False)


def _factors(reading: Reading, key: str, count: int) -> list[float]:
    """Return the factors of a key, all 1 where it is missing."""
    given = reading.get(key, [1.0] * count)
    if isinstance(given, list) and len(given) == count:
        return [reading.changed(**{key: one}).number(key, 1.0) for one in given]
    reading.problems.append(f"{key} is {json.dumps(given)[:80]}, and not a list of {count} numbers")
    return [1.0] * count


def _read(reading: Reading) -> dict[str, Any]:
    number, heads = len(shared.layer_numbers(reading)), reading.integer("mamba_n_heads")
    channels = reading.integer("mamba_d_ssm", reading.integer("mamba_expand", 2) * reading.integer("hidden_size"))
    if reading.get("mamba_d_head") == "auto":
        reading = reading.changed(mamba_d_head=max(channels // heads, 1))
    values = {**shared.decoder_values(reading, epsilon="rms_norm_eps"), **mamba_values(reading, _KEYS)}
    wanted = f"but mamba_n_heads {heads} x mamba_d_head {values['mamba_head_dim']} is not that"
    reading.refuse_unless("mamba_d_ssm", heads * values["mamba_head_dim"], channels, wanted)
    biases = ("attention_bias", "mlp_bias", "projectors_bias")
    refuse_others(reading, {**dict.fromkeys(biases, False), "mamba_use_mlp": True})
    reading.understand("num_logits_to_keep", "attn_layer_indices", "mlp_expansion_factor")
    norm = "before-gate" if reading.boolean("mamba_norm_before_gate", True) else "after-gate"
    names = ("attention_in", "attention_out", "key", "ssm_in", "ssm_out")
    of_input, of_attention, of_key, of_mixed, of_mamba = (reading.number(f"{one}_multiplier", 1.0) for one in names)
    factors = {
        "mamba_multipliers": [of_mixed * one for one in _factors(reading, "ssm_multipliers", 5)],
        "mixer_multipliers": [of_input * of_attention, of_mamba],
        "mlp_multipliers": _factors(reading, "mlp_multipliers", 2),
    }
    of_scores = of_input * of_input * of_key
    return {
        **values,
        **{name: None if {*given} == {1.0} else tuple(given) for name, given in factors.items()},
        "mamba_norm": norm if reading.boolean("mamba_rms_norm", False) else "none",
        "softmax_scale": None if of_scores == 1.0 else of_scores * values["kv_channels"] ** -0.5,
        "num_layers": 2 * number,
        "hybrid_layer_pattern": "B-" * number,
    }


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    mamba = flags_of(model, MambaFlags)
    of_attention, of_mamba = flags_of(model, SideBySideFlags).mixer_multipliers or (1.0, 1.0)
    of_scores = 1.0 if model.softmax_scale is None else model.softmax_scale * model.kv_channels**0.5
    return {
        **{**shared.decoder_json(config), **mamba_json(config, _KEYS)},
        "use_cache": True,
        "num_hidden_layers": model.num_layers // 2,
        "mamba_d_ssm": (mamba.mamba_num_heads or 1) * mamba.mamba_head_dim,
        "mamba_rms_norm": mamba.mamba_norm != "none",
        "mamba_norm_before_gate": mamba.mamba_norm == "before-gate",
        "attention_out_multiplier": of_attention,
        "key_multiplier": float(f"{of_scores:.15g}"),  # without the rounding of two roots
        "ssm_multipliers": list(mamba.mamba_multipliers or (1.0,) * 5),
        "ssm_out_multiplier": of_mamba,
        "mlp_multipliers": list(model.mlp_multipliers or (1.0, 1.0)),
    }


def _dependent(model: ModelConfig) -> dict[str, Any]:
    return {"hybrid_layer_pattern": "B-" * (model.num_layers // 2)}


_IN_LAYER = "self_attention."

FALCON_H1 = Family(
    "falcon_h1",
    "FalconH1ForCausalLM",
    {
        **shared.DECODER_NAMES,
        "pre_mlp_layernorm": ("pre_ff_layernorm",),
        "mlp.linear_fc1": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        "mlp.linear_fc2": ("feed_forward.down_proj",),
        "decoder.final_layernorm": ("model.final_layernorm",),
        **{f"{_IN_LAYER}mamba.{name.removeprefix(_IN_LAYER)}": theirs for name, theirs in mamba_names("mamba").items()},
    },
    {"swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True, "position_embedding_type": "rope"},
    *shared.keys(
        (_read, _write),
        shared.number("embedding_multiplier", "embedding_multiplier", 1.0),
        shared.number("lm_head_multiplier", "logits_multiplier", 1.0),
    ),
    {
        **{"vocab_size": 128000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192},
        **{"rms_norm_eps": 1e-5, "mamba_d_ssm": 1024, "mamba_n_heads": 128, "mamba_d_head": "auto"},
        **{"mamba_n_groups": 1, "mamba_d_state": 256},
    },
    dependent_flags=_dependent,
    halves=True,
    sections={name.replace(_IN_LAYER, f"{_IN_LAYER}mamba."): one for name, one in MAMBA_SECTIONS.items()},
)
