"""Cases that a plain run leaves out, also where a fixture trains them all together."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def marked(cases: Iterable[Any], *, slow: Collection[Any]) -> list[Any]:
    """The cases as parameters of a test; those in `slow` are left to --all."""
    names = list(cases)
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow), id=str(name)) for name in names]


def chosen(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """The values of a parameter in those tests of the requesting file that this run selects, in their order."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    values = [item.callspec.params[parameter] for item in items if parameter in item.callspec.params]  # pyright: ignore
    return list(dict.fromkeys(values))
