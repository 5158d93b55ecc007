"""The command blocks of the guides: what is fenced as bash, as it stands.

A word after `bash` says where a block can run: nothing, on any machine in seconds; `slow`, on any machine; `cluster`,
not here, for it needs GPUs, machines or files that a reader has.
"""

import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[2] / "docs"
_FENCE = re.compile(r"^([ \t]*)```([^\n`]*)\n(.*?)^\1```[ \t]*$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    language: str
    kind: str
    """The word after the language."""
    text: str


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in their order."""
    for _, info, text in _FENCE.findall(page.read_text(encoding="utf-8")):
        language, _, kind = info.strip().partition(" ")
        yield Block(page.relative_to(DOCS).as_posix(), language, kind, textwrap.dedent(text))


def script(page: str, kinds: Sequence[str] = ("",)) -> str:
    """Return the commands of a page of these kinds, one after another."""
    return "".join(each.text for each in blocks(DOCS / page) if each.language == "bash" and each.kind in kinds)


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a block on one line each, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        command = re.sub(r"(^|\s)# .*$", "", line).strip()
        if command:
            yield command
