"""Writes tables and code in Markdown, whatever the texts in them are.

table(["flag", "meaning"], [[code("--a"), "one | other"]])     # | flag | meaning |, |---|---|, ...
"""

import re
from collections.abc import Iterable, Sequence

from megatron_ext.terminal import printable


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table; its cells are Markdown, in which a bar or a new line would end the cell."""
    lines = [_line(head), "|" + "---|" * len(head)]
    return [*lines, *(_line(row) for row in rows)]


def code(text: str) -> str:
    """Return a text as code in a line: nothing in it, not even a backtick, is Markdown or HTML."""
    shown = _on_one_line(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    # A space that stands on both sides is no part of the code.
    room = " " if shown.startswith("`") or shown.endswith("`") or not shown.strip() else ""
    return f"{fence}{room}{shown}{room}{fence}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", _on_one_line(cell)) for cell in cells) + " |"


def _on_one_line(text: str) -> str:
    return printable(" ".join(text.splitlines()))
