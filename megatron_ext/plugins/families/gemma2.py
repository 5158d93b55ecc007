"""Gemma 2: Gemma with norms on both sides (`--norm-position both`), windows by `layer_types`,
`--attention-logit-softcapping`, `--final-logit-softcapping`, `--softmax-scale` (`query_pre_attn_scalar` to the power of
-1/2)."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.gemma import GEMMA
from megatron_ext.plugins.families.reading import Reading

_CAPS = {"attn_logit_softcapping": "attention_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_AFTER = {
    "post_self_attn_layernorm": ("post_attention_layernorm",),
    "pre_mlp_layernorm": ("pre_feedforward_layernorm",),
    "post_mlp_layernorm": ("post_feedforward_layernorm",),
}


def _read(reading: Reading) -> dict[str, Any]:
    has_window = shared.typed_windows(reading, shared.all_but_every(reading, 2))
    return {
        **GEMMA.read(reading),
        **shared.layer_window_values(reading, has_window),
        **shared.gelu_values(reading, "hidden_activation", "gelu_pytorch_tanh"),
        **{name: reading.number_or_none(key) for key, name in _CAPS.items()},
        "softmax_scale": reading.number("query_pre_attn_scalar", 256.0) ** -0.5,
    }


def _write(config: Config) -> dict[str, Any]:
    content = {**GEMMA.write(config), **shared.typed_window_json(config)}
    caps = {key: getattr(config.model, name) for key, name in _CAPS.items()}
    content |= {**caps, "query_pre_attn_scalar": _scalar(config.model)}
    return {**content, "hidden_activation": content.pop("hidden_act")}


def _scalar(model: ModelConfig) -> int:
    scale = model.softmax_scale or model.kv_channels**-0.5
    return max(round(min(1.0 / scale / scale, 1e15)), 1)


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    scale = {"softmax_scale": _scalar(model) ** -0.5} if model.softmax_scale else {}
    return {**GEMMA.dependent_flags(model), **scale}


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    {**GEMMA.names, **_AFTER},
    {name: value for name, value in GEMMA.flags.items() if name != "openai_gelu"} | {"norm_position": "both"},
    _read,
    _write,
    {**GEMMA.defaults, "num_key_value_heads": 4, "sliding_window": 4096, **dict(zip(_CAPS, (50.0, 30.0), strict=True))},
    dependent_flags=_dependent_flags,
    added={**GEMMA.added, **dict.fromkeys(_AFTER, 1.0)},
)
