"""tools/make_docs.py: pages that a reader can follow, of what the program has."""

import re
from pathlib import Path

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.megatron_lm.reference import pinned_command_line
from tests.support.wrong_flags import EXAMPLES
from tools import make_docs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert make_docs.main([str(tmp_path)]) == 0
    return tmp_path


def test_all_pages_are_written_and_say_first_that_they_are_generated(folder: Path) -> None:
    assert {path.name for path in folder.iterdir()} == {"flags.md", "errors.md", "formats.md"}
    for path in folder.iterdir():
        first, second, *_ = path.read_text().splitlines()
        assert first.startswith("<!-- Generated from ")
        assert "`python tools/make_docs.py`" in first
        assert second.startswith("# ")


def test_every_flag_has_its_row(folder: Path) -> None:
    page = (folder / "flags.md").read_text()
    flags = [line.split(" | ")[0] for line in pinned_command_line().splitlines() if " | " in line]
    assert [flag for flag in flags if not re.search(rf"`{flag.split(',')[0]}[ `,]", page)] == []


def test_the_table_of_errors_leads_to_their_sections(folder: Path) -> None:
    page = (folder / "errors.md").read_text()
    links = set(re.findall(r"\]\(#([^)]+)\)", page))
    anchors = {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^## (.*)$", page, re.M)
    }
    assert len(links) >= 12
    assert links <= anchors
    assert all(f"\n## {title}\n" in page for title in EXAMPLES)


def test_the_formats_name_every_exit_code_and_field(folder: Path) -> None:
    page = (folder / "formats.md").read_text()
    for exit_code in (0, 64, 65, 70, 71, 74, 75, 76):
        assert f"\n| {exit_code} | " in page
    assert "\n| `lm_loss` | `float` |  |\n" in page
    assert "\n| `elapsed_ms` | `float` | per iteration |\n" in page
    assert "\n| `validation_loss` | `float` |  |\n" in page
    assert ".idx   9 bytes magic | uint64 version" in page


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="site is not a folder; make it first"):
        make_docs.main([str(tmp_path / "site")])
