"""Reads untrusted files, and JSON: it is parsed only if its size and depth are reasonable.

    values = load_json(read_file(path, most=1 << 20))

A parser that calls itself for every level ends the process when the levels are many. That is found before anything is
built, by reading the text once as brackets. YAML is read by `yaml_text.py`.
"""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

DEPTH = 32
"""Most levels of any text that is read here."""

CONTAINERS = 1 << 22
"""Most lists and objects of a JSON text."""

_TEXT = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_BRACKET = re.compile(r"[\[\]{}]")


class TextError(ValueError):
    """Raised where the text is not as required."""


class ExcessiveError(TextError):
    """Raised where the text is larger or deeper than any that is meant well."""


def read_file(path: str | os.PathLike[str], most: int, *, pipes: bool = False) -> bytes:
    """Return the content of a file of at most so many bytes.

    Args:
        pipes: whether it may be something else than a regular file, as the shell's `<(...)`; but not a named pipe,
            which may never get a writer.
    Raises:
        ExcessiveError: the file has more bytes, or is no regular file.
        OSError: the file cannot be read.
    """
    if _is_named_pipe(path) if pipes else not stat.S_ISREG(os.stat(path).st_mode):
        raise ExcessiveError("it is no regular file")
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ExcessiveError(f"it has more than {most:,} bytes")
    return content


def load_json(content: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        TextError: the text is no JSON, names a key twice, or holds half of a character.
        ExcessiveError: the text is nested deeper than any file that is read here.
    """
    try:
        text = content.decode("utf-8-sig")
        _check_brackets(text)
        value = json.loads(text, object_pairs_hook=_unique)
        if _SURROGATE.search(text):  # as half of an escaped pair, or as what no other file can hold
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except TextError:
        raise
    except ValueError as error:  # UnicodeError is one
        raise TextError(str(error)) from None


def _is_named_pipe(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a named pipe. `<(...)` is not: it leads to /proc/N/fd/pipe:[N], which is no path."""
    return Path(os.path.realpath(path)).is_fifo()


def _check_brackets(text: str) -> None:
    depth = begun = 0
    for match in _BRACKET.finditer(_TEXT.sub("", text)):
        begins = match[0] in "[{"
        begun, depth = begun + begins, depth + (1 if begins else -1)
        if begun > CONTAINERS:
            raise ExcessiveError(f"it has more than {CONTAINERS:,} lists and objects")
        if depth > DEPTH:
            raise ExcessiveError(f"it is nested more than {DEPTH} levels deep")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise twice({name for name in members if names.count(name) > 1} if len(pairs) < 1000 else set())
    return members


def twice(names: set[str]) -> TextError:
    """Return an error that names the keys that stand twice in one mapping."""
    return TextError(f"named twice: {', '.join(sorted(names)) or 'a key of many'}")
