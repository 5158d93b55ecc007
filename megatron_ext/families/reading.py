"""Reads values of a `config.json`, checked one by one, with every problem noted by the name of its key."""

import json
import sys
from collections.abc import Mapping
from typing import Any


class Reading:
    """Holds a `config.json`, and what is wrong with it.

    Each method returns a usable value even where it finds a problem, so that all problems are found at once.
    """

    def __init__(self, content: Mapping[str, Any], defaults: Mapping[str, Any]):
        self.content = content
        self.defaults = defaults
        self.problems: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or what stands for one that is missing or null."""
        value = self.content.get(key, self.defaults.get(key, default))
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        """Return the value of a key that must be a positive integer."""
        value = self.get(key, default)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        self.problems.append(f"{key} is {json.dumps(value)}, and not a positive integer")
        return 1

    def number(self, key: str, default: float) -> float:
        """Return the value of a key that must be a positive, finite number."""
        value = self.get(key, default)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
            return float(value)
        self.problems.append(f"{key} is {json.dumps(value)}, and not a positive number")
        return 1.0

    def refuse_unless(self, key: str, wanted: Any, default: Any, why: str) -> None:
        """Note a problem, which `why` explains, unless the key has the value `wanted`."""
        value = self.get(key, default)
        if value != wanted:
            self.problems.append(f"{key} is {json.dumps(value)}, {why}")
