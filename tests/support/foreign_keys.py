"""What becomes of every key of other programs' files, for each value that means something of its own: a line for each.

`tests/golden/foreign_keys.txt` keeps them, so that no meaning changes by accident.
"""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from megatron_ext.plugins.migrate.key_meanings import OFF, Cases, Combined, Depends, Each, Meaning
from megatron_ext.plugins.migrate.translate import SOURCES, Translation, translate

_OTHER = {"learning_rate": 0.25, "betas": [0.5, 0.75]}
"""A value that no case names, where it is not a 7."""


def golden_text() -> str:
    """The whole file."""
    return "".join(f"{line}\n" for line in _lines())


def nested(key: str, value: Any) -> Any:
    """Return a file's content with one key, whose dots part the mappings; `*` is the first of a list."""
    for name in reversed(key.split(".")):
        value = [value] if name == "*" else {name: value}
    return value


def by_name(translation: Translation) -> dict[str, str]:
    """Return what became of each key of a file."""
    return {key.name: key.became for key in translation.keys}


def example(
    module: ModuleType, key: str, value: Any, beside: Mapping[str, Any] = MappingProxyType({})
) -> tuple[str, dict[str, Any]]:
    """Return the name of a key of the table in a file, and a file that has it with all that has it read."""
    name = re.sub(r"(?<!\.)\*|\*(?!\.)", "x", key)  # a star that is no index
    parts = name.split(".")
    switches = (f"{'.'.join(parts[:depth])}.enabled" for depth in range(1, len(parts)))
    content: dict[str, Any] = {}
    for other in switches:
        if other in module.TABLE:
            _put(content, other.split("."), True)
    for other, one in {**beside, name: value}.items():
        _put(content, other.split("."), one)
    return name.replace("*", "0"), content


def _put(content: dict[str, Any], names: list[str], value: Any) -> None:
    [first, *rest] = names
    if not rest:
        content[first] = value
    elif rest[0] == "*":
        content[first] = [nested(".".join(rest[1:]), value)]
    else:
        _put(content.setdefault(first, {}), rest, value)


def _lines() -> Iterator[str]:
    for source, module in SOURCES.items():
        for key, meaning in module.TABLE.items():
            for beside, value in _named(meaning, _OTHER.get(key.rsplit(".", 1)[-1], 7)):
                name, content = example(module, key, value, beside)
                [found] = [one for one in translate(source, content).keys if one.name == name]
                said = " | ".join(filter(None, (found.flags, found.reason)))
                given = "".join(f" with {other}: {one}" for other, one in beside.items())
                yield f"{source} {key}: {value}{given} -> {found.became}: {said}"


def _named(meaning: Meaning, other: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield the values that mean something of their own, each with what other keys say, and one that does not."""
    match meaning:
        case Cases(by_value, otherwise):
            off = [value for value, one in by_value.items() if one is OFF]
            for value, one in by_value.items():
                if value in off[1:]:
                    continue
                yield from (({**beside}, value) for beside, _ in _named(one, other))
            yield from _named(otherwise, other)
        case Depends(key, by_value, otherwise):
            for there, one in by_value.items():
                yield from (({key: there, **beside}, value) for beside, value in _named(one, other))
            yield from _named(otherwise, other)
        case Each(one):
            yield from ((beside, [value]) for beside, value in _named(one, other))
        case Combined(_, others, _):
            yield {others[0]: 0.5}, other
        case _:
            yield {}, other
