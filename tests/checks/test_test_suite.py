"""The suite keeps its shape: helpers lie in tests/support, and what starts ranks lies elsewhere than under unit/."""

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
STARTS_RANKS = {
    "run_ranks",
    "record",  # megatron_ext.plugins.prove.recorded_training and .proof train on ranks
    "prove",
    "Experiment",
    "torch.distributed.run",
    "torch.distributed.launch",
    "torch.multiprocessing",
    "torchrun",
    "tests.support.launched",
}
"""Names that a file under unit/ neither imports nor gives to another process."""


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The nodes of those kinds that are looked at: all of them would take a hundred megabytes."""
    return looked_at(path.read_text(encoding="utf-8"))


def looked_at(text: str) -> list[ast.AST]:
    kinds = ast.Import | ast.ImportFrom | ast.List | ast.Tuple
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


def imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Modules that are imported, the names taken from them, and both joined by a dot."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            for alias in node.names:
                yield from (alias.name, f"{node.module}.{alias.name}")


def ways_to_start_ranks(nodes: Sequence[ast.AST]) -> set[str]:
    """Those of STARTS_RANKS that are imported, or are words of a list (a command)."""
    words = {
        element.value
        for node in nodes
        if isinstance(node, ast.List | ast.Tuple)
        for element in node.elts
        if isinstance(element, ast.Constant) and isinstance(element.value, str)
    }
    return STARTS_RANKS & {*imported(nodes), *words}


def test_helpers_are_imported_from_support_alone() -> None:
    """Neither another test's module, nor a name that its module keeps to itself."""
    wrong = re.compile(r"tests\.(?!(support|fuzz)\b)|(.*\.)?test_\w+$|tests\.support\.\w+\._")
    found = {
        str(path.relative_to(TESTS)): taken
        for path in sorted(TESTS.rglob("*.py"))
        if (taken := set(filter(wrong.match, imported(nodes_of(path)))))
    }
    assert found == {}, "put what tests share into tests/support"


def test_what_starts_ranks_is_not_under_unit() -> None:
    files = set((TESTS / "unit").rglob("*.py")) - {Path(__file__)}
    found = {
        str(path.relative_to(TESTS)): ways for path in sorted(files) if (ways := ways_to_start_ranks(nodes_of(path)))
    }
    assert found == {}, "these belong to tests/distributed"


@pytest.mark.parametrize(
    "code",
    [
        "from megatron_ext.forkserver.ranks import RankError, run_ranks",
        "def f():\n    from megatron_ext.plugins.prove.recorded_training import record",
        "command = [sys.executable, '-m', 'torch.distributed.run', '--standalone']",
        "from tests.support.launched import start",
    ],
)
def test_ways_to_start_ranks_are_seen(code: str) -> None:
    assert ways_to_start_ranks(looked_at(code))


def test_a_sentence_about_flags_is_pinned_once() -> None:
    """In tests/golden/problems.txt: other tests know a problem by its flags, so that better words cost one file."""
    lines = (TESTS / "golden/problems.txt").read_text().splitlines()
    sentences = "\n".join(line for line in lines if not line.startswith((">", "#")))
    again = []
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            words = [word for word in text.split() if not word.startswith("-")]
            if len(" ".join(words)) > 60 and text.strip() in sentences:
                again.append(f"{path.name}: {text}")
    assert again == []
