"""Reads the files of tests/golden that are texts in sections."""

import functools
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@functools.cache
def _sections(name: str) -> dict[str, str]:
    parts = ("\n" + (GOLDEN / name).read_text(encoding="utf-8")).split("\n## ")[1:]
    return {part.split("\n", 1)[0]: f"## {part}".rstrip() for part in parts}


def section(name: str, title: str) -> str:
    """Return a section with its heading, and without the empty lines behind it."""
    return _sections(name)[title]
