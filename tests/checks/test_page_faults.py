"""docs/faults.md: every fault has a row, and every test that it names exists."""

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "faults.md").read_text()
NAMED_IN_A_ROW = re.compile(r"`([a-z]+/(?:\w+/)*test_\w+\.py)::(\w+)`")
NAMED = NAMED_IN_A_ROW.findall(PAGE)


@functools.cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_is_named_exists() -> None:
    assert len(NAMED) > 60
    assert [f"{file}::{name}" for file, name in NAMED if name not in functions(file)] == []
    assert all(name.startswith("test_") for _, name in NAMED)


def test_every_fault_has_a_row_with_a_test() -> None:
    rows = {int(number): line for line in PAGE.splitlines() for number in re.findall(r"^\| (\d+)\. ", line)}
    assert sorted(rows) == list(range(1, 40))
    assert [number for number, line in rows.items() if ".py::test_" not in line] == []


def test_every_row_says_how_many_tests_passed_in_how_many_seconds() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|") and NAMED_IN_A_ROW.search(line)]
    assert len(rows) > 39
    assert [row[:60] for row in rows if not re.search(r"\| [1-9]\d* in \d+\.\d s \|$", row)] == []
