"""GPT-Neo: windows in the local layers of `attention_types`, `--softmax-scale 1`."""

import json
from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.gpt2 import GPT2
from megatron_ext.plugins.families.reading import Reading

_KEYS = ("hidden_size", "num_heads", "num_layers", "max_position_embeddings", "layer_norm_epsilon")
_KINDS, _TYPES = ("global", "local"), "attention_types"
_ATTENTION = "attn.attention"


def _layers_with_window(reading: Reading, number: int) -> list[bool]:
    """Return which layers are local, by lists of kinds that are each repeated."""
    given: Any = reading.get(_TYPES, [[[*_KINDS], 12]])
    try:
        kinds = [kind for several, times in given for kind in several * min(times, number)]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != number or not {*map(str, kinds)} <= {*_KINDS}:
        reading.problems.append(
            f"{_TYPES} is {json.dumps(given)[:80]}; supported are [kinds, times] of {' and '.join(_KINDS)} that give "
            f"num_layers {number}"
        )
        return [False] * number
    reading.refuse_unless("attention_layers", kinds, kinds, f"but by {_TYPES} it is {json.dumps(kinds)[:60]}")
    return [kind == _KINDS[1] for kind in kinds]


def _read(reading: Reading) -> dict[str, Any]:
    values = shared.plain_values(reading, *_KEYS)
    sized = reading.changed(sliding_window=reading.integer("window_size", 256), num_hidden_layers=values["num_layers"])
    has_window = _layers_with_window(reading, len(shared.layer_numbers(sized)))
    reading.understand("window_size", "classifier_dropout", "tokenizer_class")
    return {**values, **shared.layer_window_values(sized, has_window)}


def _write(config: Config) -> dict[str, Any]:
    window = shared.window_json(config)["sliding_window"]
    has_window = [layer.attention.window is not None for layer in layers(config)]
    return {
        **shared.plain_json(config.model, *_KEYS),
        "window_size": window or 256,
        _TYPES: [[[_KINDS[one]], 1] for one in has_window],
    }


GPT_NEO = Family(
    "gpt_neo",
    "GPTNeoForCausalLM",
    {
        **GPT2.names,
        shared.QKV: tuple(f"{_ATTENTION}.{one}_proj" for one in "qkv"),
        "self_attention.linear_proj": (f"{_ATTENTION}.out_proj",),
    },
    {**shared.bias_flags(False, True, True), "softmax_scale": 1.0},
    *shared.keys((_read, _write), shared.gelu_mlp("intermediate_size", "hidden_size")),
    {"hidden_size": 2048, "num_layers": 24, "num_heads": 16, "vocab_size": 50257},
    aliases={"num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"},
    dependent_flags=shared.heads_fill_width,
    layers=GPT2.layers,
    dropouts=("attention_dropout", "resid_dropout", "embed_dropout"),
    is_seldom=True,
)
