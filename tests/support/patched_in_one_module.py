"""Functions of Python's library that one module alone finds replaced: other threads of the process keep theirs."""

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


def replace_in(monkeypatch: pytest.MonkeyPatch, module: ModuleType, library: str, **functions: Any) -> None:
    """Have `module`, which has imported the library as a whole, find these functions in the place of the library's.

    `monkeypatch.setattr(module.time, "sleep", ...)` would replace what every thread calls, also one that a test before
    has left: it would move a clock that goes on by what is slept.
    """
    monkeypatch.setattr(module, library, SimpleNamespace(**{**vars(getattr(module, library)), **functions}))
