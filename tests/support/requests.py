"""Puts stand-ins in the place of functions, which note by the names of their parameters what they are asked for."""

import inspect
from typing import Any

import pytest


class Requests:
    """Notes the calls of stand-ins.

    Attributes:
        made: name of the function and its arguments by parameter, in the order of the calls.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._monkeypatch = monkeypatch
        self.made: list[tuple[str, dict[str, Any]]] = []

    def take(self, owner: Any, name: str, answer: Any = None) -> None:
        """Put a stand-in in the place of `owner.name`; it takes the same parameters, and returns `answer`."""
        signature = inspect.signature(getattr(owner, name))

        def stand_in(*given: Any, **named: Any) -> Any:
            self.made.append((name, dict(signature.bind(*given, **named).arguments)))
            return answer

        self._monkeypatch.setattr(owner, name, stand_in)

    def of(self, name: str) -> dict[str, Any]:
        """Return what the only call of a function was given."""
        [given] = self.all_of(name)
        return given

    def all_of(self, name: str) -> list[dict[str, Any]]:
        """Return what each call of a function was given."""
        return [given for called, given in self.made if called == name]
