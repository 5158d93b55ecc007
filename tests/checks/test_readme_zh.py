"""README.zh.md says the same commands as README.md, and links to the same pages."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGLISH, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README.zh.md"))
PROGRAMS = ("bash ", "python ", "torchrun ", "megatron-ext ")


def blocks(page: str) -> list[str]:
    """The fenced blocks that begin with a command, without what a comment says."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    return [re.sub(r" +# .*", "", block) for block in fenced if block.startswith(PROGRAMS)]


def inline(page: str) -> set[str]:
    """The commands within sentences, on one line each."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    spans = (re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", text))
    return {span for span in spans if span.startswith((*PROGRAMS, "--", "touch "))}


def links(page: str) -> set[str]:
    """The pages and folders of the repository that it leads to."""
    return set(re.findall(r"\]\(([^)]+)\)", page)) - {"README.md", "README.zh.md"}


def test_the_commands_are_the_same() -> None:
    assert len(blocks(ENGLISH)) >= 2
    assert blocks(CHINESE) == blocks(ENGLISH)
    assert inline(CHINESE) == inline(ENGLISH)


def test_the_links_are_the_same_and_lead_somewhere() -> None:
    assert links(ENGLISH) <= links(CHINESE)
    assert [link for link in links(CHINESE) if not (ROOT / link.partition("#")[0]).exists()] == []


def test_each_names_the_other() -> None:
    assert "](README.zh.md)" in ENGLISH
    assert "](README.md)" in CHINESE
    assert len(re.findall(r"[\u4e00-\u9fff]", CHINESE)) > 500
