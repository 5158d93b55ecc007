"""Holds what several families have in common: names, flags, and parts of `config.json` in both directions."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial as with_settings
from typing import Any, Literal

from megatron_ext.config.parse.options import options_by_name
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.families.reading import Reading, refuse_others
from megatron_ext.plugins.families.rotary import KINDS, SCALINGS, rotary_json, rotary_values

QKV = "self_attention.linear_qkv"

DECODER_NAMES: dict[str, tuple[str, ...]] = {
    "embedding.word_embeddings": ("model.embed_tokens",),
    "input_layernorm": ("input_layernorm",),
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.q_layernorm": ("self_attn.q_norm",),
    "self_attention.k_layernorm": ("self_attn.k_norm",),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
    "decoder.final_layernorm": ("model.norm",),
    "output_layer": ("lm_head",),
}
ATTENTION_NAMES = {name: theirs for name, theirs in DECODER_NAMES.items() if not name.startswith("mlp.")}
"""Names of the modules of a decoder without its MLPs."""

STACKED_EXPERTS = {"mlp.experts.linear_fc1": "experts.gate_up_proj", "mlp.experts.linear_fc2": "experts.down_proj"}
"""Matrices of experts -> tensors in the Hugging Face mixture, each of all experts, transposed; `_bias` follows for
biases."""

STACKED_TRANSPOSED = frozenset(f"{matrix}{kind}" for matrix in STACKED_EXPERTS for kind in ("", ".bias"))
NEXT_TOKEN_NAMES = {one: (one,) for one in ("enorm", "hnorm", "eh_proj")} | {"final_layernorm": ("shared_head.norm",)}
"""Modules of a depth of multi-token prediction, which in Hugging Face files is a layer after the last one."""

NEXT_TOKEN_COPIES = {"embed_tokens": "embedding.word_embeddings", "shared_head.head": "output_layer"}
"""Hugging Face modules, in a depth, that repeat one of ours."""

NAMES_WITH_NORMS_AFTER: dict[str, tuple[str, ...]] = {
    **{name: theirs for name, theirs in DECODER_NAMES.items() if name not in ("input_layernorm", "pre_mlp_layernorm")},
    "post_self_attn_layernorm": ("post_attention_layernorm",),
    "post_mlp_layernorm": ("post_feedforward_layernorm",),
}
DECODER_FLAGS: dict[str, Any] = {"position_embedding_type": "rope", "swiglu": True, "normalization": "RMSNorm"}


Keys = tuple[Callable[[Reading], dict[str, Any]], Callable[[Config], dict[str, Any]]]
"""Keys of a `config.json`: a function from them to values of our flags, and one from our flags to them (`Family.read`
and `write`)."""


def keys(*each: Keys) -> Keys:
    """Return several `Keys` as one, in their order; where two of them give the same flag or key, the later one
    counts."""
    return (
        lambda reading: {name: value for read, _ in each for name, value in read(reading).items()},
        lambda config: {key: value for _, write in each for key, value in write(config).items()},
    )


def switch(key: str, flag: str, usual: bool, *, negated: bool = False, given: str = "") -> Keys:
    """Return a key whose boolean is one of our switches, or its negation.

    Args:
        usual: the key's value where it is missing.
        given: property of `ModelConfig` with the value to write; empty: `flag`.
    """
    return (
        lambda reading: {flag: reading.boolean(key, usual) != negated},
        lambda config: {key: getattr(config.model, given or flag) != negated},
    )


def size(key: str, flag: str) -> Keys:
    """Return a key that is one of our sizes, which every model has."""
    return lambda reading: {flag: reading.integer(key)}, lambda config: {key: getattr(config.model, flag)}


def number(key: str, flag: str, usual: float) -> Keys:
    """Return a key that is one of our positive numbers; `usual`: where it is missing."""
    return lambda reading: {flag: reading.number(key, usual)}, lambda config: {key: getattr(config.model, flag)}


def understood(*names: str) -> Keys:
    """Return keys that transformers does not read either."""
    return lambda reading: reading.understand(*names) or {}, lambda config: {}


def usually_scaled(scaling: Mapping[str, Any], of_decoder: Keys) -> Keys:
    """Return the keys of a decoder whose frequencies are stretched by `scaling` where the file does not say how."""
    read, write = of_decoder

    def values(reading: Reading) -> dict[str, Any]:
        said = reading.section("rope_scaling") or reading.section("rope_parameters")
        return read(reading if said else reading.changed(rope_parameters=scaling))

    return values, lambda config: {**(content := write(config)), "rope_scaling": content["rope_scaling"] or UNSCALED}


UNSCALED = {"rope_type": "default"}


def head_norms(key: str) -> Keys:
    """Return the key of norms of queries and keys with weights of each head."""
    return lambda reading: _head_norms(reading.boolean(key, False)), lambda config: {key: config.model.qk_layernorm}


def _head_norms(normed: bool) -> dict[str, Any]:
    return {"qk_layernorm": normed, "qk_layernorm_over": "each-head" if normed else "head"}


def in_one_form(usual: Mapping[str, Any]) -> Keys:
    """Return keys that only some files have, with the one value that is not refused."""
    return lambda reading: refuse_others(reading, usual) or {}, lambda config: {}


def decoder(**settings: Any) -> Keys:
    """Return the keys of every decoder with rotary positions; the settings are the arguments of `decoder_values`."""
    written = {name: settings[name] for name in ("epsilon", "partial", "biases") if name in settings}
    return with_settings(decoder_values, **settings), with_settings(decoder_json, **written)


def expert_names(mixture: str, gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    """Return the names of a decoder with experts, from the module of the mixture and the names of one expert's
    matrices.

    The router is the module `gate` of the mixture in every family.
    """
    expert = f"{mixture}.experts.{{}}"
    return {
        **ATTENTION_NAMES,
        "mlp.router": (f"{mixture}.gate",),
        "mlp.experts.linear_fc1": (f"{expert}.{gate}", f"{expert}.{up}"),
        "mlp.experts.linear_fc2": (f"{expert}.{down}",),
    }


def stacked_names(mixture: str) -> dict[str, tuple[str, ...]]:
    """Return the names of a decoder with `STACKED_EXPERTS` in this module."""
    return {
        **{**ATTENTION_NAMES, "mlp.router": (f"{mixture}.router",)},
        **{f"{ours}.weight": (f"{mixture}.{theirs}",) for ours, theirs in STACKED_EXPERTS.items()},
        **{f"{ours}.bias": (f"{mixture}.{theirs}_bias",) for ours, theirs in STACKED_EXPERTS.items()},
    }


def decoder_values(
    reading: Reading,
    *,
    epsilon: str | None = "rms_norm_eps",
    activation: str = "silu",
    partial: bool = False,
    alpha: bool = False,
    biases: Literal["attention", "all"] | None = None,
    scalings: Sequence[str] = SCALINGS,
) -> dict[str, Any]:
    """Return the values of our flags that every decoder with rotary positions has in `config.json`.

    Args:
        epsilon: key of the norms' epsilon, where there is one.
        activation: the usual one; a form of GELU may be another one.
        partial: whether a share of each head's channels may be rotated (`partial_rotary_factor`).
        alpha: whether `rope_type` dynamic may have an `alpha`, with which it is a larger base.
        biases: matrices that may have a bias: attention's matrices by `attention_bias`; with "all", the MLP's, too, by
            `mlp_bias`.
        scalings: what `rope_type` may be, besides default.
    """
    hidden, heads = reading.integer("hidden_size"), reading.integer("num_attention_heads")
    groups = reading.integer("num_key_value_heads", heads)
    values: dict[str, Any] = {
        "num_layers": reading.integer("num_hidden_layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": reading.integer("intermediate_size"),
        "num_attention_heads": heads,
        "kv_channels": reading.integer("head_dim", max(hidden // heads, 1)),
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        **({} if epsilon is None else {"norm_epsilon": reading.number(epsilon, 1e-6)}),
        "untie_embeddings_and_output_weights": not reading.boolean("tie_word_embeddings", False),
        "vocab_size": reading.integer("vocab_size"),
        "max_position_embeddings": reading.integer("max_position_embeddings", 2048),
    }
    values |= rotary_values(reading, values["kv_channels"], partial=partial, alpha=alpha, scalings=scalings)
    if heads % groups:
        reading.problems.append(f"num_attention_heads {heads} is not divisible by num_key_value_heads {groups}")
    if activation in _GELUS:
        values |= gelu_values(reading, "hidden_act", activation)
    else:
        mlp = {"silu": "SwiGLU", "relu2": "squared ReLU", "xielu": "xIELU"}[activation]
        reading.refuse_unless("hidden_act", activation, activation, f"but the MLP here is {mlp}: {activation}")
    if biases is not None:
        attention = reading.boolean("attention_bias", False)
        found = bias_flags(attention, attention, biases == "all" and reading.boolean("mlp_bias", False))
        if biases == "attention":
            del found["add_mlp_bias"]  # which config.json cannot say, so that a model with it is not of the family
        values |= found
    refuse_others(reading, {"activation": "swiglu", "rope_interleaved": False, "use_mrope": False})
    return values


def decoder_json(
    config: Config,
    epsilon: str | None = "rms_norm_eps",
    *,
    partial: bool = False,
    biases: Literal["attention", "all"] | None = None,
) -> dict[str, Any]:
    """Return the content of `config.json` that every decoder with rotary positions has; the arguments are as in
    `decoder_values`."""
    model = config.model
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "head_dim": model.kv_channels,
        "hidden_act": _activation(model),
        **({} if epsilon is None else {epsilon: model.norm_epsilon}),
        "max_position_embeddings": model.max_position_embeddings,
        **rotary_json(model, partial=partial),
        **({} if biases is None else {"attention_bias": model.has_qkv_bias}),
        **({"mlp_bias": model.has_mlp_bias} if biases == "all" else {}),
    }


def expert_values(reading: Reading, experts: int, width: int, *, normalized: bool) -> dict[str, Any]:
    """Return the values of our flags for `experts` experts of the MLP width `width` in every layer.

    Args:
        normalized: whether the weights of the experts that compute a token are normalized to the sum 1.
    """
    used = reading.integer("num_experts_per_tok")
    if used > experts and reading.is_readable:
        reading.problems.append(f"num_experts_per_tok {used} is above the number of experts, {experts}")
    if normalized and used == 1 and reading.is_readable:
        reading.problems.append(
            "num_experts_per_tok is 1 and weights are normalized, so that every expert has the weight 1 and the "
            "router cannot be trained"
        )
    return {
        "num_experts": experts,
        "moe_ffn_hidden_size": width,
        "moe_router_topk": used,
        # The softmax over the top k alone is the one over all experts, normalized over the top k.
        "moe_router_pre_softmax": not normalized,
    }


def experts(count: str, width: str, normalized: bool | str = True) -> Keys:
    """Return the keys of experts in every layer: their number, their MLP width, and what says whether the weights of a
    token's experts are normalized to the sum 1, if it is not the same in all models."""

    def values(reading: Reading) -> dict[str, Any]:
        are_normalized = reading.boolean(normalized, False) if isinstance(normalized, str) else normalized
        return expert_values(reading, reading.integer(count), reading.integer(width), normalized=are_normalized)

    def content(config: Config) -> dict[str, Any]:
        model = config.model
        said = {normalized: not model.moe_router_pre_softmax} if isinstance(normalized, str) else {}
        return {**expert_json(config), count: model.num_experts, width: model.expert_ffn_hidden_size, **said}

    return values, content


def shared_expert_width(model: ModelConfig) -> int:
    """Return the width of the shared expert, which is in every model with experts."""
    return model.moe_shared_expert_intermediate_size or model.expert_ffn_hidden_size


def expert_json(config: Config) -> dict[str, Any]:
    """Return the content of `config.json` that every family with experts has."""
    return {
        "num_experts_per_tok": config.model.moe_router_topk,
        "router_aux_loss_coef": sum(config.model.load_balancing_losses.values(), 0.0),
        "output_router_logits": False,
    }


_GELUS = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False}  # -> --openai-gelu


def _activation(model: ModelConfig) -> str:
    if model.swiglu or model.quick_geglu:
        return "silu"
    if model.xielu:
        return "xielu"
    return "relu2" if model.squared_relu else "gelu_pytorch_tanh" if model.openai_gelu else "gelu"


def gelu_values(reading: Reading, key: str, usual: str) -> dict[str, Any]:
    """Return the flag of the form of GELU; `usual`: where the key is missing or null."""
    activation = reading.get(key, usual)
    if str(activation) not in _GELUS:
        reading.problems.append(f"{key} is {json.dumps(activation)}; supported are {', '.join(_GELUS)}")
    return {"openai_gelu": _GELUS.get(str(activation), False)}


def gelu_mlp(width: str, hidden: str) -> Keys:
    """Return the keys of an MLP with GELU: its width, by default four times `hidden`, and the form of GELU."""
    return (
        lambda reading: {
            "ffn_hidden_size": reading.integer(width, 4 * reading.integer(hidden)),
            **gelu_values(reading, "activation_function", "gelu_new"),
        },
        lambda config: {
            width: config.model.ffn_hidden_size,
            "activation_function": "gelu_new" if config.model.openai_gelu else "gelu",
        },
    )


NO_PADDING = {"pad_token_id": None}
"""Content written in families whose default padding id is beyond a smaller vocabulary."""

WITHOUT_PADDING: Keys = (lambda reading: {}, lambda config: NO_PADDING)
CLIPS: Keys = (
    lambda reading: {"qkv_clip": reading.number_or_none("clip_qkv")},
    lambda config: {"clip_qkv": config.model.qkv_clip},
)


def plain_values(reading: Reading, width: str, heads: str, depth: str, length: str, epsilon: str) -> dict[str, Any]:
    """Return the values of decoders whose heads fill the width and whose MLP is four times as wide, by their keys."""
    hidden, number = reading.integer(width), reading.integer(heads)
    if hidden % number:
        reading.problems.append(f"{width} {hidden} is not divisible by {heads} {number}")
    return {
        "num_layers": reading.integer(depth),
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "num_attention_heads": number,
        "num_query_groups": number,
        "kv_channels": max(hidden // number, 1),
        "norm_epsilon": reading.number(epsilon, 1e-5),
        "untie_embeddings_and_output_weights": not reading.boolean("tie_word_embeddings", True),
        "vocab_size": reading.integer("vocab_size"),
        "max_position_embeddings": reading.integer(length, 2048),
    }


def plain_json(model: ModelConfig, *keys: str) -> dict[str, Any]:
    """Return the keys of `plain_values`, which are its arguments, but for the width of the MLP."""
    values = (model.hidden_size, model.num_attention_heads, model.num_layers, model.max_position_embeddings)
    return dict(zip(keys, (*values, model.norm_epsilon), strict=True))


PLAIN_KEYS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings")
"""Names of the first four of them in most families."""


def rotated_plain_values(
    reading: Reading, width: str, activation: str, epsilon: str, *, partial: bool = False
) -> dict[str, Any]:
    """Return the values of the same with rotary positions, the form of GELU, and a width of the MLP, by their keys."""
    values = plain_values(reading, *PLAIN_KEYS, epsilon)
    values |= rotary_values(reading, values["kv_channels"], partial=partial)
    values |= gelu_values(reading, activation, "gelu")
    return {**values, "ffn_hidden_size": reading.integer(width, values["ffn_hidden_size"])}


def rotated_plain_json(
    model: ModelConfig, width: str, activation: str, epsilon: str, *, partial: bool = False
) -> dict[str, Any]:
    """Return the keys of `rotated_plain_values`."""
    content = {**plain_json(model, *PLAIN_KEYS, epsilon), **rotary_json(model, partial=partial)}
    return {**content, width: model.ffn_hidden_size, activation: "gelu_new" if model.openai_gelu else "gelu"}


def square_flags(model: ModelConfig) -> dict[str, Any]:
    """Return the widths of `plain_values` (`Family.dependent_flags`)."""
    return {**heads_fill_width(model), "ffn_hidden_size": 4 * model.hidden_size}


def norms_of_heads(model: ModelConfig) -> dict[str, Any]:
    """Return the flags of norms of queries and keys, for families where each head has norm weights of its own, if any
    (`Family.dependent_flags`)."""
    return _head_norms(model.qk_layernorm)


def heads_fill_width(model: ModelConfig) -> dict[str, Any]:
    """Return the size of a head in families that have no key for it (`Family.dependent_flags`)."""
    return {"kv_channels": model.hidden_size // model.num_attention_heads}


def bias_flags(queries: bool, output: bool, mlp: bool) -> dict[str, bool]:
    """Return the flags of biases of queries, keys and values, of attention's output projection, and of the MLP."""
    everywhere = queries and output and mlp
    added = {"add_qkv_bias": queries, "add_output_bias": output, "add_mlp_bias": mlp}
    return {"disable_bias_linear": not everywhere, **{name: one and not everywhere for name, one in added.items()}}


def biases_of_attention(model: ModelConfig) -> dict[str, Any]:
    """Return the flag by which all matrices of attention have biases, or none has (`Family.dependent_flags`)."""
    return {"add_output_bias": model.add_qkv_bias}


def biased_mlp(model: ModelConfig) -> dict[str, Any]:
    """Return the flags of `biases_of_attention`, and the flag of an MLP with biases (`Family.dependent_flags`)."""
    return {**biases_of_attention(model), "add_mlp_bias": model.disable_bias_linear}


def own_epsilon(flag: str, epsilon: float, others: float) -> dict[str, float | None]:
    """Return the flag of norms that have this epsilon whatever `others` have: None where it is the same."""
    return {flag: None if others == epsilon else epsilon}


def all_but_every(reading: Reading, every: int) -> list[bool]:
    """Return False for every `every`-th layer, and True for all others."""
    return [(number + 1) % every != 0 for number in layer_numbers(reading)]


def layer_numbers(reading: Reading) -> range:
    """Return the indices of the layers; of more than there may be, which is refused, the first of them."""
    return range(min(reading.integer("num_hidden_layers"), options_by_name()["num_layers"].at_most or 1))


def typed_layers(reading: Reading, kinds: tuple[str, str], usual: Sequence[bool]) -> Sequence[bool]:
    """Return for each layer whether `layer_types` names the second of `kinds`; `usual`: the result where that key is
    missing."""
    typed = reading.get("layer_types")
    if typed is None:
        return usual
    if not isinstance(typed, list) or len(typed) != len(usual) or not {*map(str, typed)} <= {*kinds}:
        reading.problems.append(
            f"layer_types is {json.dumps(typed)[:80]}; supported is a list of num_hidden_layers {len(usual)} times "
            f"{' or '.join(kinds)}"
        )
        return usual
    return [kind == kinds[1] for kind in typed]


def window_values(reading: Reading) -> dict[str, Any]:
    """Return the flag of `sliding_window` in families all of whose layers have it."""
    if reading.get("sliding_window") is None:
        return {"window_size": None}
    # Megatron does not count the query's own position.
    return {"window_size": f"{reading.integer('sliding_window') - 1},0"}


def later_layers(reading: Reading) -> list[bool]:
    """Return which layers have windows: the ones from layer `max_window_layers` on."""
    first = reading.integer("max_window_layers", least=0)
    return [number >= first for number in layer_numbers(reading)]


def layer_window_values(reading: Reading, has_window: Sequence[bool]) -> dict[str, Any]:
    """Return the flags of `sliding_window` in the layers that have it."""
    skips = None if all(has_window) or not any(has_window) else pattern(has_window)
    values = window_values(reading) if any(has_window) else {"window_size": None}
    return {**values, "window_attn_skip_freq": None if values["window_size"] is None else skips}


def typed(usual: Callable[[Reading], Sequence[bool]]) -> Keys:
    """Return the keys of windows in the layers that `layer_types` names, by default the `usual` ones."""
    return (
        lambda reading: layer_window_values(reading, typed_windows(reading, usual(reading))),
        typed_window_json,
    )


def rotating_layers(reading: Reading) -> list[bool]:
    """Return which layers rotate queries and keys, by `no_rope_layers` or by its interval."""
    every = reading.integer("no_rope_layer_interval", 4)
    rotates = all_but_every(reading, every)
    named = reading.integers("no_rope_layers", 2)  # 1 in layers that rotate
    if len(named) not in (0, len(rotates)):
        reading.problems.append(f"no_rope_layers is {json.dumps(named)[:80]}; it needs {len(rotates)} times 0 or 1")
    return [one == 1 for one in named] if len(named) == len(rotates) else rotates


def _fixed_values(reading: Reading) -> dict[str, Any]:
    fixed = [not one for one in rotating_layers(reading)]
    return {"no_rope_freq": pattern(fixed) if any(fixed) else None}


def pattern(layers_with_it: Sequence[bool]) -> str:
    """Return a pattern over the layers, as flags take it."""
    return f"[{','.join(str(int(one)) for one in layers_with_it)}]"


def typed_windows(reading: Reading, usual: Sequence[bool], *, switch: str | None = None) -> Sequence[bool]:
    """Return which layers have the window by `layer_types`.

    Args:
        usual: the answer where the key is missing and there is a window.
        switch: key without which there are no windows.
    """
    kinds, number = reading.get("layer_types"), len(usual)
    has_any = (switch is None or reading.boolean(switch, False)) and reading.get("sliding_window") is not None
    reading.understand("sliding_window")
    if kinds is None:
        return usual if has_any else [False] * number
    if not isinstance(kinds, list) or len(kinds) != number or not {*map(str, kinds)} <= {*KINDS}:
        reading.problems.append(
            f"layer_types is {json.dumps(kinds)[:80]}; supported is a list of {number} times {' or '.join(KINDS)}"
        )
        return usual
    if KINDS[1] in kinds and not has_any:
        reading.problems.append(f"layer_types names {KINDS[1]}, but there is no {switch or 'sliding_window'}")
    return [kind == KINDS[1] for kind in kinds]


def switched_window_values(reading: Reading) -> dict[str, Any]:
    """Return the flags of windows that `use_sliding_window` switches on, from layer `max_window_layers` on."""
    return layer_window_values(reading, typed_windows(reading, later_layers(reading), switch="use_sliding_window"))


SWITCHED_WINDOWS: dict[str, Any] = {"sliding_window": 4096, "max_window_layers": 28}
"""Defaults of the keys that `switched_window_values` reads."""


def switched_window_json(config: Config) -> dict[str, Any]:
    """Return the keys that `switched_window_values` reads."""
    content = typed_window_json(config)
    return {**content, "use_sliding_window": content["sliding_window"] is not None}


def window_json(config: Config) -> dict[str, Any]:
    """Return `sliding_window`: the window of the layers that have one."""
    windows = {layer.attention.window for layer in layers(config)} - {None}
    return {"sliding_window": next(iter(windows), None)}


def typed_window_json(config: Config) -> dict[str, Any]:
    """Return `sliding_window` and `layer_types`."""
    has_window = [layer.attention.window is not None for layer in layers(config)]
    return {**window_json(config), "layer_types": [KINDS[window] for window in has_window]}


BIASED_MLP: Keys = (
    lambda reading: bias_flags(attention := reading.boolean("attention_bias", True), attention, True),
    lambda config: {"attention_bias": config.model.has_qkv_bias},
)
"""Biases of the MLP, and of attention or not."""

FIXED_LAYERS: Keys = (
    _fixed_values,
    lambda config: {"no_rope_layers": [int(layer.attention.rotary is not None) for layer in layers(config)]},
)
"""Layers that rotate nothing."""

WINDOWS: Keys = (window_values, window_json)
SWITCHABLE_WINDOWS: Keys = (switched_window_values, switched_window_json)
LOCAL_EXPERTS: Keys = experts("num_local_experts", "intermediate_size")
"""Mixtral's experts, which are in every layer."""
