"""What becomes of every key of other programs' files, for each value that means something of its own: a line for each.

`tests/golden/foreign_keys.txt` keeps them, so that no meaning changes by accident.
"""

from collections.abc import Iterator
from typing import Any

from megatron_ext.foreign.key_meanings import Cases, Meaning
from megatron_ext.foreign.translate import SOURCES, Translation, translate

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


def _lines() -> Iterator[str]:
    for source, module in SOURCES.items():
        for key, meaning in module.TABLE.items():
            name = key.replace("*", "0")
            for value in [*_named(meaning), _OTHER.get(key.rsplit(".", 1)[-1], 7)]:
                result = translate(source, nested(key, value))
                [found] = [one for one in result.keys if one.name == name]
                said = " | ".join(filter(None, (found.flags, found.reason)))
                yield f"{source} {key}: {value} -> {found.became}: {said}"


def _named(meaning: Meaning) -> Iterator[str]:
    while isinstance(meaning, Cases):
        yield from meaning.by_value
        meaning = meaning.otherwise
