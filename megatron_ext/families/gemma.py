"""Google's models: Gemma, Gemma 2 and Gemma 3."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families import shared
from megatron_ext.families.family import Family
from megatron_ext.families.reading import Reading
from megatron_ext.families.rotary import local_base, rotary_by_layer, scaled_without_windows


# Gemma: GeGLU, norms whose weight is stored as what it differs from 1, embeddings times the root of the width.
def _read_gemma(reading: Reading) -> dict[str, Any]:
    values = shared.decoder_values(reading, activation="gelu_pytorch_tanh", biases="attention")
    shared.refuse_others(reading, {"use_bidirectional_attention": False})
    # The released files say gelu, and mean its tanh form: so does transformers take it.
    return {**values, "openai_gelu": True, "embedding_multiplier": values["hidden_size"] ** 0.5}


def _dependent_flags_gemma(model: ModelConfig) -> dict[str, Any]:
    return {**shared.biases_of_attention(model), "embedding_multiplier": model.hidden_size**0.5}


GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    shared.DECODER_NAMES,
    {**shared.DECODER_FLAGS, "swiglu": False, "geglu": True, "openai_gelu": True, "disable_bias_linear": True},
    _read_gemma,
    shared.decoder(biases="attention")[1],
    {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 8192},
    dependent_flags=_dependent_flags_gemma,
    added={"input_layernorm": 1.0, "pre_mlp_layernorm": 1.0, "decoder.final_layernorm": 1.0},
)


# Gemma 2: Gemma with norms on both sides, windows in every second layer, and bounds of scores and logits.
_CAPS = {"attn_logit_softcapping": "attention_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_AFTER_GEMMA2 = {
    "post_self_attn_layernorm": ("post_attention_layernorm",),
    "pre_mlp_layernorm": ("pre_feedforward_layernorm",),
    "post_mlp_layernorm": ("post_feedforward_layernorm",),
}


def _read_gemma2(reading: Reading) -> dict[str, Any]:
    has_window = shared.typed_windows(reading, shared.all_but_every(reading, 2))
    return {
        **GEMMA.read(reading),
        **shared.layer_window_values(reading, has_window),
        **shared.gelu_values(reading, "hidden_activation", "gelu_pytorch_tanh"),
        **{name: reading.number_or_none(key) for key, name in _CAPS.items()},
        "softmax_scale": reading.number("query_pre_attn_scalar", 256.0) ** -0.5,
    }


def _write_gemma2(config: Config) -> dict[str, Any]:
    content = {**GEMMA.write(config), **shared.typed_window_json(config)}
    caps = {key: getattr(config.model, name) for key, name in _CAPS.items()}
    content |= {**caps, "query_pre_attn_scalar": _scalar(config.model)}
    return {**content, "hidden_activation": content.pop("hidden_act")}


def _scalar(model: ModelConfig) -> int:
    scale = model.softmax_scale or model.kv_channels**-0.5
    return max(round(min(1.0 / scale / scale, 1e15)), 1)


def _dependent_flags_gemma2(model: ModelConfig) -> dict[str, Any]:
    scale = {"softmax_scale": _scalar(model) ** -0.5} if model.softmax_scale else {}
    return {**GEMMA.dependent_flags(model), **scale}


GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    {**GEMMA.names, **_AFTER_GEMMA2},
    {name: value for name, value in GEMMA.flags.items() if name != "openai_gelu"} | {"norm_position": "both"},
    _read_gemma2,
    _write_gemma2,
    {**GEMMA.defaults, "num_key_value_heads": 4, "sliding_window": 4096, **dict(zip(_CAPS, (50.0, 30.0), strict=True))},
    dependent_flags=_dependent_flags_gemma2,
    added={**GEMMA.added, **dict.fromkeys(_AFTER_GEMMA2, 1.0)},
)


# Gemma 3's text model: Gemma 2 with norms of queries and keys, and a rotary base for layers with windows.
_LOCAL_BASE, _PATTERN = "rope_local_base_freq", "sliding_window_pattern"
_DEFAULTS_GEMMA3 = {  # which published files of models of text and images leave out
    **{"rope_theta": 1e6, "max_position_embeddings": 131072, "num_attention_heads": 8, "head_dim": 256},
    **{"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26},
}


def _read_gemma3(reading: Reading) -> dict[str, Any]:
    every = reading.integer(_PATTERN, 6)
    reading.understand("cache_implementation", f"_{_PATTERN}")  # of generation; and the same once more
    windows = shared.layer_window_values(reading, shared.typed_windows(reading, shared.all_but_every(reading, every)))
    reading, local = rotary_by_layer(reading, 10000.0, _LOCAL_BASE)
    return local_base({**GEMMA2.read(reading), **windows, **local})


def _write_gemma3(config: Config) -> dict[str, Any]:
    model = config.model
    return {**GEMMA2.write(config), _LOCAL_BASE: model.rotary_base_local or model.rotary_base}


def _dependent_flags_gemma3(model: ModelConfig) -> dict[str, Any]:
    return {**GEMMA2.dependent_flags(model), **scaled_without_windows(model)}


GEMMA3_TEXT = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    GEMMA2.names,
    {**GEMMA2.flags, "qk_layernorm": True},
    _read_gemma3,
    _write_gemma3,
    {**GEMMA2.defaults, **_DEFAULTS_GEMMA3, "attn_logit_softcapping": None, "final_logit_softcapping": None},
    dependent_flags=_dependent_flags_gemma3,
    added={**GEMMA2.added, "self_attention.q_layernorm": 1.0, "self_attention.k_layernorm": 1.0},
    inside=("gemma3", "language_model."),
)
