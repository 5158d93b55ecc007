"""OPT, Galactica: gpt2's layers with ReLU (`--relu`) or GELU, biases in all matrices or none, norms with or without
parameters; the two rows of its table of positions that no position reads are kept (`--position-embedding-offset 2`).
Not with norms after the layers (OPT-350m)."""

import json
from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import Reading

OFFSET = 2
_KEYS = (*shared.PLAIN_KEYS, "layer_norm_eps")
_BIASES, _AFFINE, _ACTIVATION = "enable_bias", "layer_norm_elementwise_affine", "activation_function"
_ACTIVATIONS = {"relu": (True, False), "gelu": (False, False), "gelu_new": (False, True)}  # --relu, --openai-gelu
_REMOVES = "remove_final_layer_norm"
_USUAL = {"do_layer_norm_before": True, f"_{_REMOVES}": False, "layerdrop": 0.0, "activation_dropout": 0.0}


def unnormalized(values: dict[str, Any]) -> dict[str, Any]:
    """Return values of flags without the norms' epsilon, which these classes have one of whatever their files say."""
    return {name: value for name, value in values.items() if name != "norm_epsilon"}


def _read(reading: Reading) -> dict[str, Any]:
    values = unnormalized(shared.plain_values(reading, *_KEYS))
    width, activation = values["hidden_size"], reading.get(_ACTIVATION, "relu")
    shared.refuse_others(reading, {**_USUAL, "word_embed_proj_dim": width})
    reading.understand("prefix")
    if str(activation) not in _ACTIVATIONS:
        reading.problems.append(f"{_ACTIVATION} is {json.dumps(activation)}; supported are {', '.join(_ACTIVATIONS)}")
    relu, tanh = _ACTIVATIONS.get(str(activation), (True, False))
    return {
        **values,
        **{"ffn_hidden_size": reading.integer("ffn_dim", 3072), "relu": relu, "openai_gelu": tanh},
        "disable_bias_linear": not reading.boolean(_BIASES, True),
        "norm_parameters": "all" if reading.boolean(_AFFINE, True) else "none",
    }


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    names = {switches: name for name, switches in _ACTIVATIONS.items()}
    content = {**shared.plain_json(model, *_KEYS), _ACTIVATION: names[model.relu, model.openai_gelu]}
    content |= {"ffn_dim": model.ffn_hidden_size, _BIASES: not model.disable_bias_linear, **shared.NO_PADDING}
    return {**content, _AFFINE: model.norm_parameters == "all"}


def _dependent_flags(model: ModelConfig) -> dict[str, Any]:
    one = {"norm_parameters": "all"} if model.norm_parameters == "weight" else {}
    return {**shared.heads_fill_width(model), **one}


_ATTENTION = {shared.QKV: tuple(f"self_attn.{one}_proj" for one in "qkv")}
LAYER_NAMES: dict[str, tuple[str, ...]] = {
    **{**_ATTENTION, "input_layernorm": ("self_attn_layer_norm",), "pre_mlp_layernorm": ("final_layer_norm",)},
    **{"self_attention.linear_proj": ("self_attn.out_proj",), "mlp.linear_fc1": ("fc1",), "mlp.linear_fc2": ("fc2",)},
}
OPT = Family(
    "opt",
    "OPTForCausalLM",
    {
        **{**LAYER_NAMES, "embedding.word_embeddings": ("model.decoder.embed_tokens",), "output_layer": ("lm_head",)},
        "embedding.position_embeddings": ("model.decoder.embed_positions",),
        "decoder.final_layernorm": ("model.decoder.final_layer_norm",),
    },
    {"norm_epsilon": 1e-5, "position_embedding_offset": OFFSET},
    _read,
    _write,
    {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50272, "dropout": 0.1},
    dependent_flags=_dependent_flags,
    layers="model.decoder.layers.{}.",
    dropouts=("attention_dropout", "dropout"),
)
