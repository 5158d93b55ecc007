"""Reads and writes what `config.json` says of rotary positions: base, share of channels, scaling, and what differs by
layer."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from megatron_ext.config.schema import ModelConfig
from megatron_ext.parts.attention.describe import scaling_of
from megatron_ext.plugins.families.reading import Reading, refuse_others

_SHARE = "partial_rotary_factor"
KINDS = ("full_attention", "sliding_attention")

SCALINGS = ("linear", "llama3", "yarn", "longrope", "dynamic")
"""Kinds of rotary scaling in `rope_type`."""


def rotary_values(
    reading: Reading, head: int, *, partial: bool = False, alpha: bool = False, scalings: Sequence[str] = SCALINGS
) -> dict[str, Any]:
    """Return the values of `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (transformers 4).

    A file may have all three, for `rope_scaling` is what model cards tell people to add. As transformers 5 does
    (`modeling_rope_utils.convert_rope_params_to_dict`), `rope_scaling` takes the place of all of `rope_parameters`, and
    keys that are in neither are read from the top level next to them. Contradictions between them are refused.
    """
    written, added = (reading.section(key) for key in ("rope_parameters", "rope_scaling"))
    for key, place in (("rope_parameters", written), ("rope_scaling", added)):
        if any(isinstance(value, dict) for value in place.values()):
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
    values: dict[str, Any] = {"rotary_base": rotary.number("rope_theta", 10000.0)}
    if partial:
        share = rotary.number("partial_rotary_factor", 1.0)
        if share > 1.0:
            rotary.problems.append(f"partial_rotary_factor is {share:g}, above 1: a head has no more channels")
        values["rotary_percent"] = min(share, 1.0)
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
            "rope_scaling_original_max_position_embeddings": rotary.integer(
                "original_max_position_embeddings", reading.integer("max_position_embeddings", 2048)
            ),
        }
    # A flag without a value here has its default in all models of the family (`Family.fixed`).
    if "llama3" in kinds:
        values["use_rope_scaling"] = kind == "llama3"
    if "linear" in kinds:
        values["rotary_seq_len_interpolation_factor"] = rotary.number("factor", 1.0) if kind == "linear" else 1.0
    values["rope_type"] = None
    if kind in kinds and kind in _STRETCHES:
        positions = reading.integer("max_position_embeddings", 2048)
        pairs = int(head * values.get("rotary_percent", 1.0)) // 2
        values |= {"rope_type": kind, **_STRETCHES[kind](rotary, positions, pairs if reading.is_readable else None)}
    if kind in kinds:
        rotary.refuse_the_rest(f"which rope_type {kind} does not read; leave it out")
    else:
        rotary.problems.append(
            f"rope_type is {json.dumps(kind)}; only {', '.join(kinds[:-1])} and {kinds[-1]} are supported"
        )
    reading.problems += [f"{name}: {problem}" for problem in dict.fromkeys(rotary.problems)]
    reading.problems += _contradictions(reading, name, beside, {**beside, **taken, "rope_type": kind})
    return values


def _yarn_values(rotary: Reading, positions: int, _pairs: int | None) -> dict[str, Any]:
    """Return the flags of YaRN. As in transformers one of the two mscales says nothing without the other
    (`modeling_rope_utils._compute_yarn_parameters`)."""
    original = rotary.integer("original_max_position_embeddings", positions)
    both = [one for key in ("mscale", "mscale_all_dim") if (one := rotary.number_from_0(key))]
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


_YARN_NUMBERS = {name: name for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")}


def _longrope_values(rotary: Reading, positions: int, pairs: int | None) -> dict[str, Any]:
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
        if one_by_one.problems or pairs not in (None, len(values[ours])):
            rotary.problems.append(f"{theirs} is {json.dumps(factors)[:60]}; it needs {pairs} numbers above 0")
    return values


_LONGROPE_FACTORS = {"longrope_short_factor": "short_factor", "longrope_long_factor": "long_factor"}


def _dynamic_values(rotary: Reading, positions: int, _pairs: int | None) -> dict[str, Any]:
    return {"rotary_scaling_factor": rotary.number("factor", 1.0), "original_max_position_embeddings": positions}


_STRETCHES = {"yarn": _yarn_values, "longrope": _longrope_values, "dynamic": _dynamic_values}
"""Functions that read the numbers of a kind of RoPE scaling, by its value of --rope-type."""


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
    refuse_others(local, {"rope_type": "default", "partial_rotary_factor": (of_all or {}).get(_SHARE, 1.0)})
    local.refuse_the_rest("which rope_type default does not read; leave it out")
    reading.problems += [f"rope_parameters: {KINDS[1]}: {problem}" for problem in local.problems]
    return reading.changed(rope_parameters=of_all) if is_by_layer else reading, {"rotary_base_local": base}


def local_base(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without the base of layers with a window, where there are none or they rotate as the others."""
    same = values.get("rotary_base") == values["rotary_base_local"] and not is_stretched(values)
    return {**values, "rotary_base_local": None} if same or values["window_size"] is None else values


def scaled_without_windows(model: ModelConfig) -> dict[str, Any]:
    """Return the flags of families that scale RoPE only in layers without a window (`Family.dependent_flags`):
    --rotary-base-local, which layers with a window need where RoPE is scaled, and rounding of YaRN's correction range,
    since transformers does not read `truncate` for some layers alone."""
    values: dict[str, Any] = {"no_yarn_correction_range_round_to_int": False}
    if model.window_size is not None and model.rotary_base_local is None and is_stretched(vars(model)):
        values["rotary_base_local"] = model.rotary_base
    return values


def is_stretched(values: Mapping[str, Any]) -> bool:
    """Return whether these values of flags stretch frequencies."""
    by_flag = values.get("use_rope_scaling") or values.get("rope_type")
    return bool(by_flag) or values.get("rotary_seq_len_interpolation_factor", 1.0) != 1.0


def changed_scaling(reading: Reading, change: Callable[[str, dict[str, Any]], dict[str, Any]]) -> Reading:
    """Return the file with what `change` makes of each key that says how frequencies are stretched, and its content."""
    places = {key: reading.get(key) for key in ("rope_scaling", "rope_parameters")}
    return reading.changed(**{key: change(key, one) for key, one in places.items() if isinstance(one, dict)})


def rotary_by_layer_json(content: dict[str, Any], model: ModelConfig, **of_both: Any) -> dict[str, Any]:
    """Return `content` with RoPE keys for each of both kinds of layers instead of keys for all layers, and `of_both` in
    each."""
    base, scaling = content.pop("rope_theta"), content.pop("rope_scaling") or {}
    of_all = {"rope_type": "default", "rope_theta": base, **of_both, **scaling}
    of_windows = {"rope_type": "default", "rope_theta": model.rotary_base_local or base, **of_both}
    return {**content, "rope_parameters": dict(zip(KINDS, (of_all, of_windows), strict=True))}


def _contradictions(reading: Reading, name: str, outer: Collection[str], taken: Mapping[str, Any]) -> Iterator[str]:
    """Yield the contradictions between `name`, whose values are taken, and other places; a `rope_type` of default
    contradicts nothing: it says no more than a missing key.

    Args:
        reading: the whole file.
        name: the place that is taken.
        outer: keys that may stand next to it.
        taken: content of `name`.
    """
    places = {"": {key: reading.content.get(key) for key in outer}}
    if name == "rope_scaling":
        places["rope_parameters: "] = reading.section("rope_parameters")
    for place, content in places.items():
        for key, value in content.items():
            key_taken = "rope_type" if key == "type" else key
            unsaid = value is None or (key_taken == "rope_type" and value == "default")
            if not unsaid and taken.get(key_taken) != value:
                yield (
                    f"{place}{key} is {json.dumps(value)}, but by {name}, which transformers reads first, it is "
                    f"{json.dumps(taken.get(key_taken))}; say it once, or the same in both"
                )
