"""Drafts the file of a family from the family whose tensors are nearest to those of a model of transformers.

This needs no torch: `tiny_models.py` makes the model, `drafted_logits.py` computes the same with the draft.
"""

import importlib
import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.errors import TrainingError
from megatron_ext.plugins import families
from megatron_ext.plugins.families import shared
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.reading import WITHOUT_BEARING, Reading
from megatron_ext.plugins.families.registry import FAMILIES
from megatron_ext.plugins.families.state_dict_mapping import state_dict_mapping

_WITHOUT = {key for keys in WITHOUT_BEARING.values() for key in keys}
_MAIN_SIZES = re.compile(r"vocab_size|hidden_size|intermediate_size|num_hidden_layers|num_attention_heads|.*token_id")


@dataclass(frozen=True)
class Draft:
    """A family that begins as another one, and what is not known of it."""

    family: Family
    base: Family
    names: dict[str, tuple[str, ...]]
    """Names of modules that the base has not."""

    same: int
    """Tensors of the model that have their place, by name and shape."""

    without_place: list[str]
    """Tensors of the model that no parameter of ours is read from."""

    missing: list[str]
    """Tensors that the draft reads and the model has not, or has in another shape."""

    problems: list[str]
    """What the base's `read` refuses in the configuration."""

    unread: list[str]
    """Keys of the configuration that the base's `read` does not ask for."""

    absent: int
    """Number of keys that the base's `read` asks for and the configuration does not have."""

    defaults: dict[str, Any] = field(default_factory=dict)
    """Values of missing keys in which the class differs from the base's."""

    unlike: tuple[str, ...] = ()
    """Flags that a file without any of the class's keys gets otherwise than by the values that the class has then."""

    pieces: tuple[str, ...] = ()
    """Code of further keys of `config.json`, for `shared.keys`."""

    def unknown(self) -> Iterator[str]:
        """Yield what has to be found out, a sentence each."""
        yield from (f"tensor {name} has no place" for name in self.without_place)
        yield from (f"tensor {name} is read, and not there with this shape" for name in self.missing)
        yield from self.problems
        yield from (f"key {key} is not read" for key in self.unread)
        yield from (f"{flag_of(name)} of a file without keys is not the class's" for name in self.unlike)

    @property
    def distance(self) -> tuple[int, int, int, int, bool]:
        """What is not known, to be as small as can be."""
        keys = len(self.problems) + len(self.unread)
        tensors = len(self.without_place) + len(self.missing)
        return tensors, keys, len(self.unlike), self.absent, self.base.is_seldom


def nearest(
    kind: str,
    architecture: str,
    content: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    usual: Mapping[str, Any],
    idle: Collection[str],
    but: Collection[str],
) -> list[Draft]:
    """Return drafts of a model, first the one that knows most.

    Args:
        kind: the model's type.
        architecture: its class, as `config.json` names it.
        content: its `config.json`.
        shapes: name -> shape of its tensors.
        usual: the keys of the class's configuration, with the values that it takes for missing ones.
        idle: keys whose values do not change logits.
        but: types of families that are not to be begun from.
    """
    modules = _modules(shapes)
    found = [
        draft
        for base in FAMILIES.values()
        if base.model_type not in (kind, *but) and (draft := _draft(base, kind, architecture, content, shapes, modules))
    ]
    best = sorted(found, key=lambda draft: draft.distance)[:_TRIED]
    return sorted((_with_defaults(_with_pieces(one, content, usual, idle), usual) for one in best), key=_distance)


_TRIED = 12
"""Drafts of which pieces and defaults are looked for."""


def _distance(draft: Draft) -> tuple[int, int, int, int, bool]:
    return draft.distance


def _draft(
    base: Family,
    kind: str,
    architecture: str,
    content: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    modules: Mapping[str, Collection[str]],
) -> Draft | None:
    names = _names(base, modules)
    prefix = next((f"{one}.{{}}." for one in modules if one.endswith("layers") or one.endswith(".h")), base.layers)
    family = replace(
        base,
        **{
            "model_type": kind,
            "architecture": architecture or base.architecture,
            "names": {**base.names, **names},
            "layers": prefix,
        },
        **{"other_names": {}, "is_common": False, "is_seldom": True},
    )
    reading = Reading(content, base.defaults, base.aliases, base.renamed)
    try:
        values = {**base.fixed, **base.read(reading)}
        mapped = state_dict_mapping(resolve(values, Facts()), family)
    except (TrainingError, KeyError, TypeError, ValueError, AssertionError, ZeroDivisionError, AttributeError):
        return None  # it describes another kind of layer
    wanted = {name: shape for one in mapped for name, shape in one.tensor_shapes().items()}
    same = [name for name, shape in wanted.items() if shapes.get(name) == shape]
    return Draft(
        family,
        base,
        names,
        len(same),
        sorted({*shapes} - {*wanted}),
        sorted({*wanted} - {*same}),
        reading.found(),
        sorted(key for key in content if key not in reading.understood and key not in _WITHOUT),
        len(reading.understood - {*content}),
    )


def _modules(shapes: Iterable[str]) -> dict[str, set[str]]:
    """Return list of layers -> modules in a layer, and "" -> modules around them, without the names of tensors and with
    `{}` for the number of an expert."""
    found: dict[str, set[str]] = {"": set()}
    for name in shapes:
        prefix, number, rest = (
            re.split(r"\.(\d+)\.", name, maxsplit=1) if re.search(r"\.\d+\.", name) else ("", "", name)
        )
        module = rest.removesuffix(".weight").removesuffix(".bias")
        found.setdefault(prefix, set()).add(re.sub(r"\.\d+\.", ".{}.", module))
        assert number is not None
    return found


def _known() -> dict[str, list[tuple[str, tuple[str, ...]]]]:
    """Return the last part of a name of theirs -> modules of ours that families call so, the most frequent first."""
    counts: dict[str, dict[tuple[str, tuple[str, ...]], int]] = {}
    for family in FAMILIES.values():
        for ours, theirs in family.names.items():
            for one in theirs:
                of_name = counts.setdefault(one.rpartition(".")[2], {})
                of_name[ours, theirs] = of_name.get((ours, theirs), 0) + 1
    return {name: sorted(found, key=lambda one: -found[one]) for name, found in counts.items()}


def _names(base: Family, modules: Mapping[str, Collection[str]]) -> dict[str, tuple[str, ...]]:
    """Return names for the modules of a model that the base does not have, as other families call such a module."""
    there = {one for several in modules.values() for one in several}
    taken = {one for theirs in base.names.values() for one in theirs}
    found: dict[str, tuple[str, ...]] = {}
    known = _known()
    for module in sorted(there - taken):
        parent, _, last = module.rpartition(".")
        for ours, theirs in known.get(last, ()):
            own = tuple(f"{parent}.{one.rpartition('.')[2]}" if parent else one for one in theirs)
            has_it = {*base.names.get(ours, ())} <= there and ours in base.names
            if {*own} <= there and not has_it and ours not in found:
                found[ours] = own
                break
    return found


def _with_pieces(draft: Draft, content: Mapping[str, Any], usual: Mapping[str, Any], idle: Collection[str]) -> Draft:
    """Return the draft with the keys that its base does not read: as a piece of `shared.py` reads them, without a
    bearing, or in the one form that the class has by default. A list may have an entry for each layer: it stays
    unread."""
    unread, pieces, read = {*draft.unread}, [], draft.base.read
    known = {name: one for name, one in vars(shared).items() if name.isupper() and isinstance(one, tuple)}
    while found := {name: covered for name, one in known.items() if (covered := _asked(one, draft, usual) & unread)}:
        name = max(found, key=lambda one: (len(found[one]), -len(_asked(known[one], draft, usual)), one))
        pieces.append(f"shared.{name}")
        read = shared.keys((read, lambda _: {}), known[name])[0]
        unread -= found[name]
    without = sorted(unread & {*idle})
    fixed = {key: content[key] for key in sorted(unread - {*without}) if not isinstance(content[key], list)}
    pieces += [f"shared.understood({', '.join(map(_quoted, without))})"] if without else []
    pieces += [f"shared.in_one_form({_quoted(fixed)})"] if fixed else []
    left = sorted(unread - {*without, *fixed})
    return replace(draft, unread=left, pieces=tuple(pieces), family=replace(draft.family, read=read))


def _asked(piece: Any, draft: Draft, usual: Mapping[str, Any]) -> set[str]:
    """Return the keys that a piece asks for in a configuration of usual values, of which it refuses none."""
    if not (len(piece) == 2 and all(map(callable, piece))):
        return set()
    reading = Reading(usual, draft.base.defaults, draft.base.aliases, draft.base.renamed)
    try:
        piece[0](reading)
    except (KeyError, TypeError, ValueError, AttributeError):
        return set()
    return set() if reading.problems else {*reading.understood}


def _with_defaults(draft: Draft, usual: Mapping[str, Any]) -> Draft:
    """Return the draft with the values of missing keys that change what `read` returns."""
    rotary = _flat(usual)
    said = {key: value for key, value in usual.items() if key != "rope_parameters" or not rotary} | rotary
    base = draft.family
    others = {*said, *base.aliases, *base.aliases.values(), *base.renamed}
    # A key that the class does not have says nothing, whatever the base takes for it.
    defaults = {key: value if key in others else None for key, value in draft.base.defaults.items()}
    asked = Reading(usual, defaults, base.aliases, base.renamed)
    base.read(asked)
    known = [key for key, value in said.items() if key in asked.understood and not isinstance(value, list)]
    for key in [one for one in known if not _MAIN_SIZES.fullmatch(one)]:
        before, after = (_values(base, _sizes(usual), {**defaults, **more}) for more in ({}, {key: said[key]}))
        if before != after:
            defaults[key] = said[key]
    more = {key: value for key, value in defaults.items() if draft.base.defaults.get(key, ...) != value}
    by_defaults, by_class = (_values(base, one, defaults) or {} for one in (_sizes(usual), usual))
    names = {*by_defaults, *by_class} - {""}
    unlike = tuple(sorted(name for name in names if by_defaults.get(name) != by_class.get(name)))
    return replace(draft, defaults=more, unlike=unlike, family=replace(draft.family, defaults=defaults))


def _sizes(usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of sizes that every file has."""
    return {key: value for key, value in usual.items() if _MAIN_SIZES.fullmatch(key)}


def _flat(usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of rotary positions as files of transformers 4 have them."""
    inner = usual.get("rope_parameters")
    if not isinstance(inner, dict) or inner.get("rope_type", "default") != "default":
        return {}
    return {key: inner[key] for key in ("rope_theta", "partial_rotary_factor") if key in inner}


def _values(base: Family, content: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the flags that are read of a configuration, and under "" its problems; None where nothing can be."""
    reading = Reading(content, defaults, base.aliases, base.renamed)
    try:
        return {**base.read(reading), "": reading.found()}
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def dropouts(usual: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of rates of dropout that a class has."""
    known = {key for family in FAMILIES.values() for key in family.dropouts}
    return tuple(key for key in usual if key in known)


def text_of(draft: Draft, usual: Mapping[str, Any]) -> str:
    """Return the draft as the text of a module of `megatron_ext/plugins/families/`."""
    module, variable = _where(draft.base)
    kind = draft.family.model_type
    lines = [f'model_type="{kind}",']
    if draft.family.architecture != draft.base.architecture:
        lines += [f'architecture="{draft.family.architecture}",']
    if draft.names:
        lines += [f"names={_mapping(f'**{variable}.names', draft.names)},"]
    read = f"_READ, _WRITE = shared.keys(\n    ({variable}.read, {variable}.write),\n"
    read += "".join(f"    {piece},\n" for piece in draft.pieces) + ")\n\n"
    lines += ["read=_READ,", "write=_WRITE,"] if draft.pieces else []
    if draft.defaults:
        lines += [f"defaults={_mapping(f'**{variable}.defaults', draft.defaults)},"]
    if draft.family.layers != draft.base.layers:
        lines += [f'layers="{draft.family.layers}",']
    if (own := dropouts(usual)) != draft.base.dropouts:
        lines += [f"dropouts={own!r},".replace("'", '"')]
    lines += ["other_names={},"] if draft.base.other_names else []
    lines += ["is_common=False,"] if draft.base.is_common else []
    lines += ["is_seldom=True,"]
    body = textwrap.indent("\n".join(lines), "    ")
    name = re.sub(r"\W", "_", kind).upper()
    uses = "from megatron_ext.plugins.families import shared\n" if draft.pieces else ""
    head = f'"""{kind}: {draft.base.model_type}\'s class."""\n\nfrom dataclasses import replace\n\n'
    head += f"{uses}from {module} import {variable}\n\n{read if draft.pieces else ''}"
    return f"{head}{name} = replace(\n    {variable},\n{body}\n)\n"


def _mapping(first: str, entries: Mapping[str, Any]) -> str:
    parts = [first, *(f"{_quoted(key)}: {_quoted(value)}" for key, value in entries.items())]
    flat = "{" + ", ".join(parts) + "}"
    return flat if len(flat) < 95 else "{\n" + "".join(f"    {part},\n" for part in parts) + "}"


def _quoted(value: Any) -> str:
    return re.sub(r"'([^'\"]*)'", r'"\1"', repr(value))


def _where(base: Family) -> tuple[str, str]:
    """Return the module and the variable that hold a family of the folder `families/`."""
    module = f"{families.__name__}.{base.model_type.replace('-', '_')}"
    return module, next(name for name, value in vars(importlib.import_module(module)).items() if value is base)
