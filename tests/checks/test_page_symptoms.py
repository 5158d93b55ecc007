"""docs/symptoms.md sends its reader to flags, tools and pages that exist."""

import re
from pathlib import Path

import pytest

from megatron_ext.config.parse.options import options_by_flag

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/symptoms.md").read_text()
# torchrun's and docker's, and those of other programs that the page compares with
OF_OTHERS = {
    *("--nproc-per-node", "--nnodes", "--node-rank", "--master-port", "--max-restarts", "--shutdown-timeout"),
    *("--shm-size", "--num", "--zero-stage", "--pid"),
}
OF_THE_PROGRAM = {"--config", "--dry-run"}


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def flags_of_tools() -> set[str]:
    folders = ("tools/*.py", "megatron_ext/cli/*.py", "megatron_ext/plugins/*/commands/*.py")
    text = "".join(path.read_text() for folder in folders for path in ROOT.glob(folder))
    return set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', text))


def test_every_flag_exists() -> None:
    named = set(re.findall(r"--[a-z][a-z0-9-]+", PAGE))
    assert len(named) > 50
    assert named - set(options_by_flag()) - flags_of_tools() == (OF_OTHERS | OF_THE_PROGRAM) - flags_of_tools()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\btools/\w+\.py|\bexamples/[\w/.]+\w", PAGE))))
def test_every_tool_and_example_exists(path: str) -> None:
    assert (ROOT / path).is_file()


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        file, _, anchor = target.partition("#")
        text = (ROOT / "docs" / file).read_text()
        headings = {
            re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in text.splitlines()
        }
        assert not anchor or anchor in headings, target


def test_each_row_says_symptom_cause_check_and_fix() -> None:
    assert len(rows()) > 40
    for row in rows():
        assert len(row) == 4, row
        assert all(row), row
