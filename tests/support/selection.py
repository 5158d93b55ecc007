"""Cases that a run leaves out, also where a fixture trains them all together."""

from collections.abc import Collection, Iterable, Mapping, Set
from typing import Any

import pytest


def marked(cases: Iterable[Any], *, slow: Collection[Any]) -> list[Any]:
    """The cases as parameters of a test; those in `slow` are left to --all."""
    names = list(cases)
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow), id=str(name)) for name in names]


def covering(choices: Mapping[str, Set[str]]) -> list[str]:
    """Return the names of few cases that together hold every choice that any case holds: one after the other, the one
    that adds most. Choices that do not depend on each other are guarded so without their products."""
    left = set[str]().union(*choices.values())
    found: list[str] = []
    while left:
        found.append(max(choices, key=lambda name: len(choices[name] & left)))
        left -= choices[found[-1]]
    return found


def choices_of(flags: str) -> set[str]:
    """Return the flags of a command line, and of those whose value is a word, flag and value."""
    found: set[str] = set()
    flag = ""
    for word in flags.split():
        if word.startswith("--"):
            flag = word
        found |= {flag} if word == flag or word[0].isdigit() else {f"{flag} {word}"}
    return found


def chosen(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """The values of a parameter in those tests of the requesting file that this run selects, in their order."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    values = [item.callspec.params[parameter] for item in items if parameter in item.callspec.params]  # pyright: ignore
    return list(dict.fromkeys(values))
