"""Checks parsed values: a check describes the required value, and names the first part that differs.

    check = fields({"iteration": integer()}, {"tasks": mapping(number)})
    check({"iteration": 3, "tasks": {"a": "b"}})      # TextError: tasks: a: 'b' is no number

A check returns nothing, and raises TextError for a value that it does not take.
"""

import math
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ext.untrusted.text import TextError

Check = Callable[[Any], None]
"""Raises TextError for a value that it does not take."""


LARGEST = 2**53 - 1
"""Largest integer that is taken by default: the next ones are not all floats."""


def number(value: Any) -> None:
    """Take a number that a float can hold, NaN and infinities too."""
    if type(value) is not float and not (type(value) is int and abs(value) < 2**64):
        raise _error(value, "no number")


def boolean(value: Any) -> None:
    """Check that a value is true or false."""
    if type(value) is not bool:
        raise _error(value, "neither true nor false")


def finite(least: float, most: float) -> Check:
    """Return a check of a number from `least` to `most`."""

    def check(value: Any) -> None:
        number(value)
        if not least <= value <= most or math.isnan(value):
            raise _error(value, f"no number from {least:g} to {most:g}")

    return check


def integer(least: int = 0, most: int = LARGEST) -> Check:
    """Return a check of an integer from `least` to `most`."""

    def check(value: Any) -> None:
        if type(value) is not int or not least <= value <= most:
            raise _error(value, f"no integer from {least:,} to {most:,}")

    return check


def text(most: int) -> Check:
    """Return a check of a text of at most `most` characters."""

    def check(value: Any) -> None:
        if type(value) is not str or len(value) > most:
            raise _error(value, f"no text of at most {most:,} characters")

    return check


def or_null(check: Check) -> Check:
    """Return a check of null, or of a value that `check` accepts."""
    return lambda value: None if value is None else check(value)


def items(check: Check, most: int) -> Check:
    """Return a check of a list of at most `most` values that `check` accepts."""

    def check_items(value: Any) -> None:
        if type(value) is not list or len(value) > most:
            raise _error(value, f"no list of at most {most:,}")
        for index, item in enumerate(value):
            _inside(str(index), check, item)

    return check_items


def mapping(check: Check, most: int = 1000) -> Check:
    """Return a check of an object of at most `most` keys, with values that `check` accepts."""

    def check_mapping(value: Any) -> None:
        if type(value) is not dict or len(value) > most:
            raise _error(value, f"no object of at most {most:,}")
        for key, item in value.items():
            _inside(key, check, item)

    return check_mapping


def fields(needed: Mapping[str, Check], others: Mapping[str, Check] | None = None) -> Check:
    """Return a check of an object with all the needed fields; it may have the others, and any that are not named."""
    known = {**needed, **(others or {})}

    def check_fields(value: Any) -> None:
        if type(value) is not dict:
            raise _error(value, "no object")
        missing = needed.keys() - value.keys()
        if missing:
            raise TextError(f"it has no {', '.join(sorted(missing))}")
        for key, check in known.items():
            if key in value:
                _inside(key, check, value[key])

    return check_fields


def _inside(key: str, check: Check, value: Any) -> None:
    try:
        check(value)
    except TextError as error:
        raise TextError(f"{key[:100]}: {error}") from None


def _error(value: Any, what: str) -> TextError:
    return TextError(f"{reprlib.repr(value)} is {what}")
