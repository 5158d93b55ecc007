"""docs/tour.md, docs/inside and CONTRIBUTING.md name files that exist."""

import re
from pathlib import Path

import megatron.core
import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "docs/tour.md", *sorted((ROOT / "docs/inside").glob("*.md"))]
FOLDERS = ("megatron_ext", "tests", "tools", "tasks", "examples", "benchmarks")


@pytest.fixture(scope="module")
def files() -> list[str]:
    """Paths of all programs and of megatron-core's files, each behind a slash."""
    ours = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    engine = [path for folder in megatron.core.__path__ for path in Path(folder).rglob("*.py")]
    return [path.as_posix() for path in (*ours, *engine, ROOT / "pretrain_gpt.py")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_files_that_exist(page: Path, files: list[str]) -> None:
    named = set(re.findall(r"[\w./-]*\w\.(?:py|sh)\b", page.read_text()))
    assert sorted(name for name in named if not any(file.endswith(f"/{name.lstrip('/')}") for file in files)) == []
