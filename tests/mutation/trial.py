"""Chooses the tests of each mutant, and has a warm process try them on a copy of the tree.

What was recorded (`record`) says which tests execute a line. A mutant's tests are those, the files in turn, and after
them the other tests of these files, which may look at what a shared run has left; as many as a budget of seconds
allows. The first that fails has caught the mutant. So has one that hangs.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.mutation.operators import Mutant, mutants_of, sample

ROOT = Path(__file__).resolve().parents[2]
_VARIABLES_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_AT_IMPORT = "import"
BY_HAND = "by hand"
"""The operator of mistakes that somebody has thought of."""
_INTERPRETERS = ("subprocess", "launched", "sys.executable", "fresh=True", "plain_process")


@dataclass
class Recorded:
    """Which tests execute which lines."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Processor seconds of each test, in the order of the run."""
    waits: dict[str, float] = field(default_factory=dict)
    """Seconds of each test in which it did not compute."""
    by_line: dict[tuple[str, int], list[str]] = field(default_factory=lambda: defaultdict(list))
    at_import: set[tuple[str, int]] = field(default_factory=set)
    """Lines that run when the package is imported: no mutant of these can be tried in a process that has done so."""
    failed: set[str] = field(default_factory=set)
    """Tests that failed without a mutant, and say nothing of one."""

    def tests_of(self, path: str, lines: Iterable[int], budget: float) -> list[str]:
        """Return the tests to try on a mutant of these lines, in their order.

        Files that name the module and start interpreters are among them: there a test executes lines unseen.
        """
        by_file: dict[str, list[str]] = defaultdict(list)
        for name in dict.fromkeys(name for line in lines for name in self.by_line.get((path, line), ())):
            by_file[name.split("::")[0]].append(name)
        files = sorted(by_file, key=lambda file: min(self.seconds[name] for name in by_file[file]))
        # The files in turn, the quickest test of each first: tests of one file look at the same things.
        in_turn = (sorted(by_file[file], key=self.seconds.__getitem__) for file in files)
        wanted = [name for turn in zip_longest(*in_turn) for name in turn if name is not None]
        seen = set(wanted)
        files += sorted(self._naming(path) - by_file.keys())
        wanted += [name for name in self.seconds if name.split("::")[0] in files and name not in seen]
        chosen, spent = [], 0.0
        for name in wanted:
            if chosen and spent + self.seconds[name] > budget:
                continue
            chosen.append(name)
            spent += self.seconds[name]
        # A file's tests one after another, for they share what they have trained.
        order = {file: number for number, file in enumerate(files)}
        place = {name: number for number, name in enumerate(self.seconds)}
        return sorted(chosen, key=lambda name: (order[name.split("::")[0]], name not in seen, place[name]))

    def _naming(self, path: str) -> set[str]:
        """Return the files of tests that name a file's module, and start interpreters."""
        module = path.removesuffix(".py").replace("/", ".")
        room, _, name = module.rpartition(".")
        spelled = (f"{module} import", f"import {module}", f"from {room} import {name}\n")
        files = {test.split("::")[0] for test in self.seconds}
        texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
        texts = {file: text for file, text in texts.items() if any(word in text for word in _INTERPRETERS)}
        return {file for file, text in texts.items() if any(one in text for one in spelled)}


def read_recorded(path: Path) -> Recorded:
    """Return what `record` has written; tests that failed there are left out."""
    found = Recorded()
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row.get("item") == _AT_IMPORT:
            found.at_import |= {(file, number) for file, lines in row["lines"].items() for number in lines}
        elif row.get("fails"):
            found.failed.add(row["item"])
        elif "item" in row and row["item"] not in found.seconds:
            found.seconds[row["item"]] = row["processor"]
            found.waits[row["item"]] = max(0.0, row["seconds"] - row["processor"])
            for file, lines in row["lines"].items():
                for number in lines:
                    found.by_line[file, number].append(row["item"])
    return found


def lines_of_statement(source: str, line: int) -> range:
    """Return the lines of the innermost statement that a line belongs to; of a compound one those of its head.

    An interpreter tells of the lines on which instructions begin, which need not be the line of a continued expression.
    """
    found = range(line, line + 1)
    for node in ast.walk(ast.parse(source)):  # outer nodes come before inner ones
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            if node.lineno <= line <= last:
                found = range(node.lineno, last + 1)
    return found


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Make a copy of the working tree as git sees it, removed at the end."""
    with tempfile.TemporaryDirectory(prefix="mutate_") as name:
        tree = Path(name).resolve() / "tree"
        words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
        for file in filter(None, listed):
            if (ROOT / file).is_file():
                (tree / file).parent.mkdir(parents=True, exist_ok=True)
                (tree / file).write_bytes((ROOT / file).read_bytes())
        yield tree


def record(tests: Sequence[str], output: Path, *, seconds: float, light: bool = False) -> None:
    """Append to `output` which lines each test executes; files of tests that it has are left out.

    Args:
        seconds: no file is begun after so long.
        light: whether all these tests do without torch, which is then not loaded.
    """
    done = {json.loads(line).get("file") for line in output.read_text().splitlines()} if output.exists() else set()
    left = [name for name in tests if name not in done]
    if left:
        _in_host({"mode": "record", "files": left, "seconds": seconds, "light": light}, output)


def chosen_mutants(
    paths: Sequence[str], each: int, seed: int, recorded: Recorded, without: Sequence[str] = ()
) -> list[Mutant]:
    """Return `each` mutants of every file, of lines that do not run at import, and of no operator in `without`."""
    found = []
    for path in paths:
        every = mutants_of((ROOT / path).read_text(encoding="utf-8"), path)
        wanted = (one for one in every if (path, one.line) not in recorded.at_import and one.operator not in without)
        found += sample(list(wanted), each, seed)
    return found


def planted_by_hand(path: Path) -> list[Mutant]:
    """Return the mistakes of a file that somebody has thought of, one JSON line for each: path, original, replacement.

    Raises:
        ValueError: an original does not stand in its file exactly once, or its replacement moves the lines after it.
    """
    found = []
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        file, original, replacement = row["path"], row["original"], row["replacement"]
        before, *after = (ROOT / file).read_text(encoding="utf-8").split(original)
        if len(after) != 1 or original.count("\n") != replacement.count("\n"):
            raise ValueError(f"{path}: {original!r} stands {len(after)} times in {file}, or moves its lines")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n") - 1
        found.append(Mutant(file, BY_HAND, line, column, original, replacement))
    return found


def try_mutants(
    mutants: Sequence[Mutant],
    recorded: Recorded,
    output: Path,
    *,
    budget: float,
    seconds: float,
    light: bool = False,
    room_for: float = 6.0,
    idle: float = 20.0,
) -> None:
    """Append to `output` what became of each mutant.

    Args:
        budget: processor seconds of tests, as recorded, that a mutant may take.
        seconds: no mutant is begun after so long.
        light: whether all their tests do without torch.
        room_for: seconds for each recorded one after which its tests count as hung; others may use the processors.
        idle: seconds without work, beyond twice those of the test that waits longest, after which they do, too.
    """
    jobs, files = [], set()
    for mutant in mutants:
        source = (ROOT / mutant.path).read_text(encoding="utf-8")
        tests = recorded.tests_of(mutant.path, lines_of_statement(source, mutant.line), budget)
        if not tests:
            _append(output, {**asdict(mutant), "outcome": "no test", "tests": 0, "seconds": 0.0})
            continue
        files |= {name.split("::")[0] for name in tests}
        changed = mutant.apply(source)
        job = {"mutant": asdict(mutant), "path": mutant.path, "source": changed, "items": tests}
        jobs.append({**job, "limits": _limits(recorded, tests, room_for, idle)})
    if jobs:
        asked = {"mode": "try", "jobs": jobs, "files": sorted(files), "seconds": seconds, "light": light}
        asked["known"] = [*recorded.seconds, *sorted(recorded.failed)]  # others were written since then
        _in_host(asked, output)


def _limits(recorded: Recorded, tests: Sequence[str], room_for: float, idle: float) -> dict[str, tuple[float, float]]:
    """Return by file of tests how many seconds they may take, and how many without work."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for name in tests:
        by_file[name.split("::")[0]].append(name)
    return {
        file: (
            40.0 + room_for * sum(recorded.seconds[name] for name in names),
            idle + 2 * max(recorded.waits.get(name, 0.0) for name in names),
        )
        for file, names in by_file.items()
    }


def read_results(path: Path) -> dict[Mutant, dict[str, Any]]:
    """Return the last result of each mutant."""
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else ()
    names = ("path", "operator", "line", "column", "original", "replacement")
    return {Mutant(**{name: row[name] for name in names}): row for row in rows}


def _in_host(jobs: Mapping[str, Any], output: Path) -> None:
    """Let a process of its own run jobs in a copy of the tree."""
    with copied_tree() as tree:
        asked = tree.parent / "jobs.json"
        asked.write_text(json.dumps(jobs))
        environment = {name: value for name, value in os.environ.items() if name not in _VARIABLES_OF_A_LAUNCHER}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(tree)}
        command = [sys.executable, "-m", "tests.mutation.host", str(asked), str(output.resolve())]
        subprocess.run(command, cwd=tree, env=environment, check=False)


def _append(output: Path, row: dict[str, Any]) -> None:
    with output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
