"""docs/libraries.md: every row names tests that exist, every finding has a row, and what is not met is not there."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
ROWS = [
    line
    for line in (ROOT / "docs" / "libraries.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| behaviour |")
]
NAMED_IN_A_ROW = re.compile(r"`([a-z]+/(?:\w+/)*test_\w+\.py)::(\w+)`")
PACKAGES = {"datasets", "grain", "litdata", "datasketch", "gguf", "optax", "deepspeed", "emerging_optimizers"}
FUNCTIONS = {
    *("get_optimizer_state_dict", "clip_grad_norm_", "distribute_tensor", "FlopCounterMode"),
    *("mse_loss", "huber_loss", "smooth_l1_loss", "soft_margin_loss"),
}
"""What the page says this program does without."""


@functools.cache
def functions(file: str) -> set[str]:
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_row_names_tests_that_exist() -> None:
    assert len(ROWS) >= 40
    assert [row for row in ROWS if not NAMED_IN_A_ROW.search(row.rsplit(" | ", 1)[1])] == []
    named = {pair for row in ROWS for pair in NAMED_IN_A_ROW.findall(row)}
    assert [f"{file}::{name}" for file, name in sorted(named) if name not in functions(file)] == []
    assert all(name.startswith("test_") for _, name in named)


def test_every_finding_has_a_row_and_every_script_that_is_named_exists() -> None:
    named = re.findall(r"`findings/([\w-]+)\.sh`", "\n".join(ROWS))
    assert sorted(named) == sorted(path.stem for path in (ROOT / "findings").glob("*.sh"))


def met(code: str) -> Iterator[str]:
    """Yield which of the packages a program imports, and which of the functions it mentions."""
    for node in ast.walk(ast.parse(code)):
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        packages = [node.module or ""] if isinstance(node, ast.ImportFrom) else imported
        yield from PACKAGES & {name.partition(".")[0] for name in packages}
        yield from FUNCTIONS & ({node.attr} if isinstance(node, ast.Attribute) else {*imported})


def test_what_is_not_met_is_named_nowhere() -> None:
    files = [path for folder in ("megatron_ext", "tools", "tasks") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    found = {path.relative_to(ROOT).as_posix(): [*met(path.read_text())] for path in files}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "code", ["import gguf.constants", "from grain.python import x", "import torch\ntorch.nn.utils.clip_grad_norm_"]
)
def test_what_is_met_is_found(code: str) -> None:
    assert [*met(code)]
