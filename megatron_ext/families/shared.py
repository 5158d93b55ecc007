"""Holds what several families have in common: names, flags, and parts of `config.json` in both directions."""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

from megatron_ext.config.parse.options import options_by_name
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.families.reading import Reading
from megatron_ext.parts.attention.describe import scaling_of
from megatron_ext.parts.stack import layers

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
NEXT_TOKEN_NAMES = {one: (one,) for one in ("enorm", "hnorm", "eh_proj")} | {"final_layernorm": ("shared_head.norm",)}
"""Modules of a depth of multi-token prediction, which is a layer after the last one there."""

NEXT_TOKEN_COPIES = {"embed_tokens": "embedding.word_embeddings", "shared_head.head": "output_layer"}
"""Modules there, in a depth, that repeat one of ours."""

NAMES_WITH_NORMS_AFTER: dict[str, tuple[str, ...]] = {
    **{name: theirs for name, theirs in DECODER_NAMES.items() if name not in ("input_layernorm", "pre_mlp_layernorm")},
    "post_self_attn_layernorm": ("post_attention_layernorm",),
    "post_mlp_layernorm": ("post_feedforward_layernorm",),
}
DECODER_FLAGS: dict[str, Any] = {"position_embedding_type": "rope", "swiglu": True, "normalization": "RMSNorm"}


SCALINGS = ("linear", "llama3", "yarn", "longrope", "dynamic")
"""Kinds of rotary scaling in `rope_type`."""


def granite_values(reading: Reading) -> dict[str, float]:
    """Return the factors of Granite's embeddings, of what layers add, of products of queries and keys, and of
    logits."""
    return {
        "embedding_multiplier": reading.number("embedding_multiplier", 1.0),
        "residual_multiplier": reading.number("residual_multiplier", 1.0),
        "logits_multiplier": 1.0 / max(reading.number("logits_scaling", 1.0), 1e-300),
        "softmax_scale": reading.number("attention_multiplier", 1.0),
    }


def granite_json(config: Config) -> dict[str, float]:
    """Return the keys of `granite_values`."""
    model = config.model
    return {
        "embedding_multiplier": model.embedding_multiplier,
        "residual_multiplier": model.residual_multiplier,
        "logits_scaling": float(f"{1.0 / model.logits_multiplier:.15g}"),  # without the rounding of two inverses
        "attention_multiplier": model.softmax_scale or model.kv_channels**-0.5,
    }


def expert_names(mixture: str, gate: str, up: str, down: str) -> dict[str, tuple[str, ...]]:
    """Return the names of a decoder with experts: the module of the mixture, and those of one expert's matrices.

    The router is the module `gate` of the mixture in every family.
    """
    expert = f"{mixture}.experts.{{}}"
    return {
        **{name: theirs for name, theirs in DECODER_NAMES.items() if not name.startswith("mlp.")},
        "mlp.router": (f"{mixture}.gate",),
        "mlp.experts.linear_fc1": (f"{expert}.{gate}", f"{expert}.{up}"),
        "mlp.experts.linear_fc2": (f"{expert}.{down}",),
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
        biases: matrices that may have one: those of attention by `attention_bias`, all with those of the MLP by
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
        values |= bias_flags(attention, attention, biases == "all" and reading.boolean("mlp_bias", False))
    refuse_others(reading, {"activation": "swiglu", "rope_interleaved": False, "use_mrope": False})
    return values


def decoder_json(
    config: Config,
    epsilon: str | None = "rms_norm_eps",
    *,
    partial: bool = False,
    biases: Literal["attention", "all"] | None = None,
) -> dict[str, Any]:
    """Return the content of `config.json` that every decoder with rotary positions has; the arguments are those of
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
        "attention_dropout": 0.0,
        **rotary_json(model, partial=partial),
        **({} if biases is None else {"attention_bias": model.has_qkv_bias}),
        **({"mlp_bias": model.has_mlp_bias} if biases == "all" else {}),
    }


def rotary_json(model: ModelConfig, *, partial: bool = False) -> dict[str, Any]:
    """Return the keys of `rotary_values`."""
    content: dict[str, Any] = {"rope_theta": model.rotary_base, "rope_scaling": scaling_json(model)}
    if partial:
        content["partial_rotary_factor"] = model.rotary_percent
    if model.rope_type == "dynamic":
        content["max_position_embeddings"] = model.original_max_position_embeddings
    return content


def scaling_json(model: ModelConfig) -> dict[str, Any] | None:
    """Return `rope_scaling`; None where nothing is stretched."""
    if model.rope_type in ("yarn", "longrope", "dynamic"):
        if model.rope_type == "yarn" and model.rotary_scaling_factor == 1.0:
            return None
        content: dict[str, Any] = {"rope_type": model.rope_type, "factor": model.rotary_scaling_factor}
        if model.rope_type == "dynamic":
            return content
        content["original_max_position_embeddings"] = model.original_max_position_embeddings
        names = _YARN_NUMBERS if model.rope_type == "yarn" else _LONGROPE_FACTORS
        content |= {theirs: getattr(model, ours) for ours, theirs in names.items()}
        if model.no_yarn_correction_range_round_to_int:
            content["truncate"] = False
        by_mscales = (model.mscale and model.mscale_all_dim) or (model.mscale, model.mscale_all_dim) == (1.0, 0.0)
        scaling = scaling_of(model)
        if scaling is not None and (model.rotary_attention_factor or not by_mscales):
            content["attention_factor"] = scaling.of_table
        return content
    if model.rotary_seq_len_interpolation_factor != 1.0:
        return {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    if not model.use_rope_scaling:
        return None
    return {
        "rope_type": "llama3",
        "factor": model.rope_scaling_factor,
        "low_freq_factor": model.rope_scaling_low_freq_factor,
        "high_freq_factor": model.rope_scaling_high_freq_factor,
        "original_max_position_embeddings": model.rope_scaling_original_max_position_embeddings,
    }


_YARN_NUMBERS = {name: name for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")}
_LONGROPE_FACTORS = {"longrope_short_factor": "short_factor", "longrope_long_factor": "long_factor"}


def expert_values(reading: Reading, experts: int, width: int, *, normalized: bool) -> dict[str, Any]:
    """Return the values of our flags for `experts` experts of the MLP width `width` in every layer.

    Args:
        normalized: whether the weights of the experts that compute a token are normalized to the sum 1.
    """
    used = reading.integer("num_experts_per_tok")
    if used > experts:
        reading.problems.append(f"num_experts_per_tok {used} is above the number of experts, {experts}")
    if normalized and used == 1:
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


def expert_json(config: Config) -> dict[str, Any]:
    """Return the content of `config.json` that every family with experts has."""
    return {
        "num_experts_per_tok": config.model.moe_router_topk,
        "router_aux_loss_coef": sum(config.model.load_balancing_losses.values(), 0.0),
        "output_router_logits": False,
    }


_GELUS = {"gelu_new": True, "gelu_pytorch_tanh": True, "gelu": False}  # -> --openai-gelu


def _activation(model: ModelConfig) -> str:
    if model.swiglu:
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


NO_PADDING = {"pad_token_id": None}
"""What is written in families whose default is an entry that a smaller vocabulary does not have."""


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


_PLAIN_KEYS = ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings")


def rotated_plain_values(
    reading: Reading, width: str, activation: str, epsilon: str, *, partial: bool = False
) -> dict[str, Any]:
    """Return the values of the same with rotary positions, the form of GELU, and a width of the MLP, by their keys."""
    values = plain_values(reading, *_PLAIN_KEYS, epsilon)
    values |= rotary_values(reading, values["kv_channels"], partial=partial)
    values |= gelu_values(reading, activation, "gelu")
    return {**values, "ffn_hidden_size": reading.integer(width, values["ffn_hidden_size"])}


def rotated_plain_json(
    model: ModelConfig, width: str, activation: str, epsilon: str, *, partial: bool = False
) -> dict[str, Any]:
    """Return the keys of `rotated_plain_values`."""
    content = {**plain_json(model, *_PLAIN_KEYS, epsilon), **rotary_json(model, partial=partial)}
    return {**content, width: model.ffn_hidden_size, activation: "gelu_new" if model.openai_gelu else "gelu"}


def square_flags(model: ModelConfig) -> dict[str, Any]:
    """Return the widths of `plain_values` (`Family.dependent_flags`)."""
    return {**heads_fill_width(model), "ffn_hidden_size": 4 * model.hidden_size}


def heads_fill_width(model: ModelConfig) -> dict[str, Any]:
    """Return the size of a head in families that have no key for it (`Family.dependent_flags`)."""
    return {"kv_channels": model.hidden_size // model.num_attention_heads}


def bias_flags(queries: bool, output: bool, mlp: bool) -> dict[str, bool]:
    """Return the flags of biases of queries, keys and values, of attention's output projection, and of the MLP."""
    everywhere = queries and output and mlp
    added = {"add_qkv_bias": queries, "add_output_bias": output, "add_mlp_bias": mlp}
    return {"disable_bias_linear": not everywhere, **{name: one and not everywhere for name, one in added.items()}}


def biases_of_attention(model: ModelConfig) -> dict[str, Any]:
    """Return that all matrices of attention have biases, or none has (`Family.dependent_flags`)."""
    return {"add_output_bias": model.add_qkv_bias}


def layer_numbers(reading: Reading) -> range:
    """Return the indices of the layers; of more than there may be, which is refused, the first of them."""
    return range(min(reading.integer("num_hidden_layers"), options_by_name()["num_layers"].at_most or 1))


def window_values(reading: Reading) -> dict[str, Any]:
    """Return the flag of `sliding_window` in families all of whose layers have it."""
    if reading.get("sliding_window") is None:
        return {"window_size": None}
    # Megatron does not count the query's own position.
    return {"window_size": f"{reading.integer('sliding_window') - 1},0"}


def layer_window_values(reading: Reading, has_window: Sequence[bool]) -> dict[str, Any]:
    """Return the flags of `sliding_window` in the layers that have it."""
    skips = None if all(has_window) or not any(has_window) else pattern(has_window)
    values = window_values(reading) if any(has_window) else {"window_size": None}
    return {**values, "window_attn_skip_freq": None if values["window_size"] is None else skips}


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


KINDS = ("full_attention", "sliding_attention")


def switched_window_values(reading: Reading) -> dict[str, Any]:
    """Return the flags of windows that `use_sliding_window` switches on, from layer `max_window_layers` on."""
    first = reading.integer("max_window_layers", least=0)
    usual = [number >= first for number in layer_numbers(reading)]
    return layer_window_values(reading, typed_windows(reading, usual, switch="use_sliding_window"))


SWITCHED_WINDOWS: dict[str, Any] = {"sliding_window": 4096, "max_window_layers": 28}
"""Their defaults."""


def switched_window_json(config: Config) -> dict[str, Any]:
    """Return the same keys."""
    content = typed_window_json(config)
    return {**content, "use_sliding_window": content["sliding_window"] is not None}


def window_json(config: Config) -> dict[str, Any]:
    """Return `sliding_window`: the window of the layers that have one."""
    windows = {layer.attention.window for layer in layers(config)} - {None}
    return {"sliding_window": next(iter(windows), None)}


def typed_window_json(config: Config) -> dict[str, Any]:
    """Return the same with `layer_types`."""
    has_window = [layer.attention.window is not None for layer in layers(config)]
    return {**window_json(config), "layer_types": [KINDS[window] for window in has_window]}


def refuse_others(reading: Reading, usual: Mapping[str, Any]) -> None:
    """Refuse what only some files have, and what our model has in one form alone: key -> its one value."""
    for key, value in usual.items():
        reading.refuse_unless(key, value, value, f"only {json.dumps(value)} is supported")


def rotary_by_layer(reading: Reading, usual: float, key: str | None = None) -> tuple[Reading, dict[str, Any]]:
    """Return the file as if all layers rotated as those without a window do, and the flag of the base of the others.

    Args:
        usual: their base where the file says nothing.
        key: name of their base outside of `rope_parameters`, if there is one.
    """
    base = usual if key is None else reading.number(key, usual)
    named, added = reading.get("rope_parameters"), reading.get("rope_scaling")
    is_by_layer = (
        isinstance(named, dict) and {*named} == {*KINDS} and all(isinstance(one, dict) for one in named.values())
    )
    of_all, of_windows = (named[kind] for kind in KINDS) if is_by_layer else (None, {})
    for scaling in (added, of_all):  # of some layers transformers does not read it
        if isinstance(scaling, dict) and scaling.get("truncate") is False:
            reading.problems.append("truncate is false, only true is supported")
    local = Reading(of_windows, {}, {"rope_type": "type"})
    base = local.number("rope_theta", base)
    refuse_others(local, {"rope_type": "default", "partial_rotary_factor": 1.0})
    local.refuse_the_rest("which rope_type default does not read; leave it out")
    reading.problems += [f"rope_parameters: {KINDS[1]}: {problem}" for problem in local.problems]
    return reading.changed(rope_parameters=of_all) if is_by_layer else reading, {"rotary_base_local": base}


def local_base(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without the base of layers with a window, where there are none or they rotate as the others."""
    same = values.get("rotary_base") == values["rotary_base_local"] and not _is_stretched(values)
    return {**values, "rotary_base_local": None} if same or values["window_size"] is None else values


def scaled_without_windows(model: ModelConfig) -> dict[str, Any]:
    """Return that layers with a window have a base of their own, where what is stretched is that of the others, and
    what cannot be said of some layers (`Family.dependent_flags`)."""
    values: dict[str, Any] = {"no_yarn_correction_range_round_to_int": False}
    if model.window_size is not None and model.rotary_base_local is None and _is_stretched(vars(model)):
        values["rotary_base_local"] = model.rotary_base
    return values


def _is_stretched(values: Mapping[str, Any]) -> bool:
    by_flag = values.get("use_rope_scaling") or values.get("rope_type")
    return bool(by_flag) or values.get("rotary_seq_len_interpolation_factor", 1.0) != 1.0


def rotary_values(
    reading: Reading, head: int, *, partial: bool = False, alpha: bool = False, scalings: Sequence[str] = SCALINGS
) -> dict[str, Any]:
    """Return the values of `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4).

    A file may have all three, for `rope_scaling` is what model cards tell people to add. As transformers 5 does
    (`modeling_rope_utils.convert_rope_params_to_dict`), `rope_scaling` takes the place of all of `rope_parameters`, and
    what neither says is taken from next to them. Where they say different things, that is refused.
    """
    written, added = (reading.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    for key, place in (("rope_parameters", written), ("rope_scaling", added)):
        if not isinstance(place, dict) or any(isinstance(value, dict) for value in place.values()):
            reading.problems.append(f"{key} differ between layers, which is not supported")
            return {}
    kinds = ("default", *scalings)
    name, taken = ("rope_scaling", added) if added else ("rope_parameters", written)
    beside = {"rope_theta": reading.number("rope_theta", 10000.0)}
    rotary = Reading(taken, beside, {"rope_type": "type"})
    if partial:
        beside["partial_rotary_factor"] = reading.number("partial_rotary_factor", 1.0)
    else:
        for place in (reading, rotary):
            place.refuse_unless("partial_rotary_factor", 1.0, 1.0, "only 1 is supported")
    kind = rotary.get("rope_type", "default")
    values: dict[str, Any] = {
        "rotary_base": rotary.number("rope_theta", 10000.0),
        **({"rotary_percent": rotary.number("partial_rotary_factor", 1.0)} if partial else {}),
    }
    if alpha and kind == "dynamic" and rotary.get("alpha") is not None:
        # NTK-aware interpolation by a fixed factor: HunYuanDenseV1RotaryEmbedding.compute_ntk_alpha_rope_parameters.
        try:
            values["rotary_base"] *= rotary.number("alpha", 1.0) ** (head / max(head - 2, 1))
        except OverflowError:
            rotary.problems.append(f"alpha is {rotary.get('alpha')}, for which no base of the frequencies is finite")
        rotary.understand("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # which that does not read
        kind = "default"
    if kind == "llama3":
        values |= {
            "rope_scaling_factor": rotary.number("factor", 8.0),
            "rope_scaling_low_freq_factor": rotary.number("low_freq_factor", 1.0),
            "rope_scaling_high_freq_factor": rotary.number("high_freq_factor", 4.0),
            "rope_scaling_original_max_position_embeddings": rotary.integer("original_max_position_embeddings"),
        }
    # What is not said here no model of the family has (`Family.fixed`).
    if "llama3" in kinds:
        values["use_rope_scaling"] = kind == "llama3"
    if "linear" in kinds:
        values["rotary_seq_len_interpolation_factor"] = rotary.number("factor", 1.0) if kind == "linear" else 1.0
    values["rope_type"] = None
    if kind in kinds and kind in _STRETCHES:
        positions = reading.integer("max_position_embeddings", 2048)
        pairs = int(head * values.get("rotary_percent", 1.0)) // 2
        values |= {"rope_type": kind, **_STRETCHES[kind](rotary, positions, pairs)}
    if kind in kinds:
        rotary.refuse_the_rest(f"which rope_type {kind} does not read; leave it out")
    else:
        rotary.problems.append(
            f"rope_type is {json.dumps(kind)}; only {', '.join(kinds[:-1])} and {kinds[-1]} are supported"
        )
    reading.problems += [f"{name}: {problem}" for problem in dict.fromkeys(rotary.problems)]
    reading.problems += _contradictions(reading, name, beside, {**beside, **taken, "rope_type": kind})
    return values


def _yarn_values(rotary: Reading, positions: int, _pairs: int) -> dict[str, Any]:
    """Return the flags of YaRN. As in transformers one of the two mscales says nothing without the other
    (`modeling_rope_utils._compute_yarn_parameters`)."""
    original = rotary.integer("original_max_position_embeddings", positions)
    both = [rotary.number(key, 1.0) for key in ("mscale", "mscale_all_dim") if rotary.get(key)]
    if rotary.get("mscale_all_dim") and len(both) < 2:
        rotary.problems.append("mscale_all_dim without mscale is not supported; add the mscale that is meant")
    return {
        "rotary_scaling_factor": rotary.number("factor", positions / original),
        "original_max_position_embeddings": original,
        "rotary_attention_factor": rotary.number_or_none("attention_factor"),
        "beta_fast": rotary.number("beta_fast", 32.0),
        "beta_slow": rotary.number("beta_slow", 1.0),
        "no_yarn_correction_range_round_to_int": not rotary.boolean("truncate", True),
        **dict(zip(("mscale", "mscale_all_dim"), both if len(both) == 2 else (1.0, 0.0), strict=True)),
    }


def _longrope_values(rotary: Reading, positions: int, pairs: int) -> dict[str, Any]:
    original = rotary.integer("original_max_position_embeddings", positions)
    values: dict[str, Any] = {
        "rotary_scaling_factor": max(rotary.number("factor", positions / original), 1.0),
        "original_max_position_embeddings": original,
        "rotary_attention_factor": rotary.number_or_none("attention_factor"),
    }
    for ours, theirs in _LONGROPE_FACTORS.items():
        factors: Any = rotary.get(theirs)
        one_by_one = Reading(dict(enumerate(factors)) if isinstance(factors, list) else {}, {})  # pyright: ignore[reportArgumentType]
        values[ours] = tuple(one_by_one.number(index, 0.0) for index in one_by_one.content)
        if one_by_one.problems or len(values[ours]) != pairs:
            rotary.problems.append(f"{theirs} is {json.dumps(factors)[:60]}; it needs {pairs} numbers above 0")
    return values


def _dynamic_values(rotary: Reading, positions: int, _pairs: int) -> dict[str, Any]:
    return {"rotary_scaling_factor": rotary.number("factor", 1.0), "original_max_position_embeddings": positions}


_STRETCHES = {"yarn": _yarn_values, "longrope": _longrope_values, "dynamic": _dynamic_values}
"""What reads the numbers of a kind of scaling that is a value of --rope-type."""


def _contradictions(reading: Reading, name: str, outer: Collection[str], taken: Mapping[str, Any]) -> Iterator[str]:
    """Yield where another place says something else than what is taken from `name`; that nothing is scaled is said by
    no more than a default.

    Args:
        reading: the whole file.
        name: the place that is taken.
        outer: keys that may stand next to it.
        taken: what it says.
    """
    places = {"": {key: reading.content.get(key) for key in outer}}
    if name == "rope_scaling":
        places["rope_parameters: "] = reading.get("rope_parameters") or {}
    for place, content in places.items():
        for key, value in content.items():
            key_taken = "rope_type" if key == "type" else key
            unsaid = value is None or (key_taken == "rope_type" and value == "default")
            if not unsaid and taken.get(key_taken) != value:
                yield (
                    f"{place}{key} is {json.dumps(value)}, but by {name}, which transformers reads first, it is "
                    f"{json.dumps(taken.get(key_taken))}; say it once, or the same in both"
                )
