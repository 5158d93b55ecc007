"""What the guides send their reader to is there: pages, headings and files."""

import re
from pathlib import Path

import pytest

from tools import make_docs

ROOT = Path(__file__).resolve().parents[3]
GENERATED = {ROOT / "docs" / name for name in make_docs.PAGES}  # which a new checkout does not have
GUIDES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")} - GENERATED)
FOLDERS = (ROOT, ROOT / "megatron_ext", ROOT / "tests")
OF_OTHERS = {"config/train_gpt2.py"}  # nanoGPT's


def headings(page: Path) -> set[str]:
    """The names by which a page's headings are linked to."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found}


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_links_lead_somewhere(guide: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", guide.read_text()):
        if link.startswith("https://"):
            continue
        name, _, heading = link.partition("#")
        page = guide.parent / name if name else guide
        assert page.exists(), link
        assert page.resolve() not in GENERATED, f"{link} is not there before tools/make_docs.py has run"
        assert not heading or heading in headings(page), link


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_files_that_are_named_exist(guide: Path) -> None:
    named = set(re.findall(r"`(\w+/[\w./-]+\.(?:py|sh|yaml|json|jsonl|txt))`", guide.read_text())) - OF_OTHERS
    ours = {name for name in named if any((folder / name.split("/")[0]).is_dir() for folder in FOLDERS)}
    assert [name for name in ours if not any((folder / name).exists() for folder in FOLDERS)] == []
