"""tools/mutate.py plants what it says, in place of what is loaded, and its page says what became of it."""

import collections
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.mutation import host, trial
from tests.mutation.host import Lines, replace_function
from tests.mutation.operators import Mutant, mutants_of, sample
from tests.mutation.page import (
    BEFORE,
    BEGIN,
    END,
    JUDGED,
    OF_A_READER,
    OF_A_SECOND_READER,
    PAGE,
    RESULTS,
    name_of,
    of_a_reader,
    of_a_second_reader,
    page,
    read_judged,
    whole_page,
)
from tests.mutation.trial import Recorded, read_results

SOURCE = '''
"""A text of a file is no code: 1 < 2."""
LIMIT = 5


class Sums:
    def total(self, groups, values, first: int = 0):
        assert first >= 0, "nothing is planted here"
        os.fsync(3)
        if first < len(values) and groups.tp.size() > 1:
            return values.sum(dim=0, dtype=torch.float32)
        if not values:
            raise ValueError(f"{first + 1} is in no text")
        return max(values[0], values[-1])

    def alone(self, names):
        return zip(names, strict=True)
'''
PLANTED = {
    "omitted fsync or barrier": "if 0: os.fsync(3)",
    "dropped condition": "(first < len(values))",
    "off by one": "first <= len(values)",
    "wrong process group": "groups.dp",
    "wrong axis": "1",
    "wrong dtype": "torch.bfloat16",
    "sum for mean, min for max": "values.mean",
    "negated condition": "bool(values)",
    "omitted refusal": 'if 0: raise ValueError(f"{first + 1} is in no text")',
    "first for last": "values[-1]",
    "swapped arguments": "max(values[-1], values[0])",
}


def test_each_kind_of_mistake_is_planted() -> None:
    found = mutants_of(SOURCE, "sums.py")
    texts = {(mutant.operator, mutant.replacement) for mutant in found}
    assert set(PLANTED.items()) <= texts
    assert {mutant.line for mutant in found} == {9, 10, 11, 12, 13, 14}
    for mutant in found:
        changed = mutant.apply(SOURCE)
        assert changed != SOURCE
        assert changed.count("\n") == SOURCE.count("\n"), "lines stay where they are"
        compile(changed, "sums.py", "exec")


def test_a_sample_takes_the_operators_in_turn_and_is_the_same_again() -> None:
    every = mutants_of(SOURCE, "sums.py")
    chosen = sample(every, 6, seed=3)
    assert chosen == sample(list(every), 6, seed=3) != sample(every, 6, seed=4)
    assert len({mutant.line for mutant in chosen}) == 6
    assert set(sample(every, len(every), seed=3)) == set(every)


def test_another_text_is_not_changed() -> None:
    mutant = Mutant("sums.py", "off by one", 3, 8, "5", "6")
    assert mutant.apply(SOURCE) == SOURCE.replace("LIMIT = 5", "LIMIT = 6")
    with pytest.raises(ValueError, match=r"sums\.py:3 does not hold '5'"):
        mutant.apply(SOURCE.replace("5", "7"))


LOADED = """
def decorated(function):
    return lambda *values: function(*values)

class Base:
    def name(self):
        return 1

class Counter(Base):
    @staticmethod
    @decorated
    def add(a, b):
        return [x + y for x, y in zip(a, b)]

    def name(self):
        return super().name()
"""


def test_loaded_functions_get_the_code_of_the_changed_text() -> None:
    loaded: dict[str, Any] = {}
    exec(compile(LOADED, "loaded.py", "exec"), loaded)
    counter = loaded["Counter"]
    inner = counter.add.__closure__[0].cell_contents
    codes = {one: one.__code__ for one in (inner, counter.name)}
    functions = {("loaded.py", code.co_qualname, code.co_firstlineno): [one] for one, code in codes.items()}
    assert replace_function(functions, "loaded.py", LOADED) == 0
    [plus] = [one for one in mutants_of(LOADED, "loaded.py") if one.replacement == "(x - y)"]
    assert replace_function(functions, "loaded.py", plus.apply(LOADED)) == 1
    assert counter.add([3], [1]) == [2]
    assert replace_function(functions, "loaded.py", LOADED.replace("super().name()", "super().name() + 1")) == 2
    assert counter().name() == 2


CONTINUED = """
def f(first,
      second):
    for one in (first,
                second):
        print(
            one,
            second,
        )
"""


@pytest.mark.parametrize(
    ("line", "lines"), [(2, [2, 3]), (3, [2, 3]), (5, [4, 5]), (6, [6, 7, 8, 9]), (8, [6, 7, 8, 9])]
)
def test_a_continued_line_is_executed_where_its_statement_is(line: int, lines: list[int]) -> None:
    assert list(trial.lines_of_statement(CONTINUED, line)) == lines


def test_tests_that_execute_a_line_come_first_and_the_quickest_file_before_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("slow", "quick", "other"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "here.py").write_text("from megatron_ext.data.x import f\n")
    (tmp_path / "naming.py").write_text("import subprocess\nfrom megatron_ext.data.x import f\n")
    monkeypatch.setattr(trial, "ROOT", tmp_path)
    seconds = {"slow.py::a": 5.0, "slow.py::b": 1.0, "quick.py::a": 0.1, "quick.py::b": 0.2, "other.py::a": 0.1}
    recorded = Recorded({**seconds, "naming.py::a": 0.1, "here.py::a": 0.1})
    recorded.by_line["megatron_ext/data/y.py", 3] += ["slow.py::b", "quick.py::b"]
    assert recorded.tests_of("megatron_ext/data/y.py", [3], 100.0) == [
        "quick.py::b",
        "quick.py::a",
        "slow.py::b",
        "slow.py::a",
    ]
    assert recorded.tests_of("megatron_ext/data/y.py", [3], 1.5) == ["quick.py::b", "quick.py::a", "slow.py::b"]
    assert recorded.tests_of("megatron_ext/data/y.py", [3], 0.01) == ["quick.py::b"], "one is always tried"
    assert recorded.tests_of("megatron_ext/data/y.py", [4], 100.0) == []
    assert recorded.tests_of("megatron_ext/data/x.py", [4], 100.0) == ["naming.py::a"], "in an interpreter of its own"


def test_mistakes_of_a_file_are_planted_where_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums.py").write_text(SOURCE)
    monkeypatch.setattr(trial, "ROOT", tmp_path)

    def planted(original: str, replacement: str) -> list[Mutant]:
        row = {"path": "sums.py", "original": original, "replacement": replacement}
        (tmp_path / "mistakes.jsonl").write_text(json.dumps(row) + "\n")
        return trial.planted_by_hand(tmp_path / "mistakes.jsonl")

    [found] = planted("dtype=torch.float32", "dtype=torch.bfloat16")
    assert (found.operator, found.line) == ("by hand", 11)
    assert found.apply(SOURCE) == SOURCE.replace("torch.float32", "torch.bfloat16")
    for original, replacement in (("not there", "x"), ("LIMIT = 5", "LIMIT = 5\n"), ("names", "x")):
        times = SOURCE.count(original)
        with pytest.raises(ValueError, match=rf"stands {times} times in sums\.py, or moves its lines"):
            planted(original, replacement)


def test_lines_are_recorded_of_this_process_and_of_its_forks(tmp_path: Path) -> None:
    folder = tmp_path / "megatron_ext"
    folder.mkdir()
    source = "def f(x):\n    if x:\n        return 1\n    return 2\n"
    (folder / "part.py").write_text(source)
    part: dict[str, Any] = {}
    exec(compile(source, str(folder / "part.py"), "exec"), part)
    if sys.monitoring.get_tool(sys.monitoring.COVERAGE_ID) is not None:
        pytest.skip("something else watches the lines of this process")
    lines = Lines(tmp_path)
    try:
        lines.begin()
        child = os.fork()
        if child == 0:
            part["f"](1)
            os._exit(0)
        os.waitpid(child, 0)
        assert lines.end() == {"megatron_ext/part.py": [2, 3]}
        lines.begin()
        part["f"](0)
        assert lines.end() == {"megatron_ext/part.py": [2, 4]}
    finally:
        sys.monitoring.free_tool_id(sys.monitoring.COVERAGE_ID)


def test_a_test_that_fails_without_a_mutant_catches_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is known, so that nobody takes it for one that was written since, and it is not chosen."""
    common = {"seconds": 1.0, "processor": 1.0, "lines": {"tests/mutation/page.py": [25]}}
    rows = [
        {"item": "import", "seconds": 0.0, "lines": {}},
        {"item": "tests/a.py::test_good", "fails": False, **common},
        {"item": "tests/a.py::test_bad", "fails": True, **common},
        {"file": "tests/a.py"},
    ]
    (tmp_path / "lines").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked: list[Any] = []
    monkeypatch.setattr(trial, "_in_host", lambda jobs, output: asked.append(jobs))
    monkeypatch.setattr(Recorded, "_naming", lambda recorded, path: set())
    mutant = Mutant("tests/mutation/page.py", "by hand", 25, 11, "mutant.path", "mutant.line")
    found = trial.read_recorded(tmp_path / "lines")
    monkeypatch.setattr(Mutant, "apply", lambda mutant, text: text)
    trial.try_mutants([mutant], found, tmp_path / "output", budget=5.0, seconds=5.0)
    [jobs] = asked
    assert [job["items"] for job in jobs["jobs"]] == [["tests/a.py::test_good"]]
    assert jobs["known"] == ["tests/a.py::test_good", "tests/a.py::test_bad"]


def test_who_only_waits_has_hung_before_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's: a busy machine lets nobody compute at times."""
    assert _hung(monkeypatch, used=0.0) == (False, "idle for 0.6 s")
    assert _hung(monkeypatch, used=0.01) == (False, "over 0.9 s")


def _hung(monkeypatch: pytest.MonkeyPatch, used: float) -> tuple[bool, str]:
    """Return what is said of a process that uses so many seconds of the processor from look to look."""
    looks = itertools.count()
    waited: list[float] = []

    def select(*given: Any) -> tuple[list[int], list[int], list[int]]:
        waited.append(given[-1])
        return [], [], []

    monkeypatch.setattr(host, "select", SimpleNamespace(select=select))
    monkeypatch.setattr(host, "time", SimpleNamespace(monotonic=lambda: sum(waited)))
    monkeypatch.setattr(host, "_of_descendants", lambda: {7: used * next(looks)})
    return host.until_ready(3, 0.9, 0.6)


def test_what_a_child_computes_is_seen() -> None:
    child = os.fork()
    if child == 0:
        collections.deque(itertools.repeat(0), maxlen=0)
    try:
        deadline = time.monotonic() + 60.0
        while host._of_descendants()[child] < 0.05:
            assert time.monotonic() < deadline
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_who_has_said_something_has_not_hung() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"x")
    assert host.until_ready(reader, 600.0, 600.0) == (True, "")
    os.close(reader)
    os.close(writer)


def test_the_page_is_what_was_found() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0].strip() == whole_page(), "run python tools/mutate.py table"
    known = {
        name_of(mutant) for path in (BEFORE, RESULTS, OF_A_READER, OF_A_SECOND_READER) for mutant in read_results(path)
    }
    assert read_judged(JUDGED).keys() <= known


def test_a_page_counts_by_room(tmp_path: Path) -> None:
    mutants = [Mutant(f"megatron_ext/{room}/a.py", "off by one", n, 0, "1", "2") for room in "xy" for n in (1, 2)]
    outcomes = [("caught", "caught"), ("survived", "caught"), ("survived", "survived"), ("no test", "no test")]
    for name, side in (("before", 0), ("after", 1)):
        rows = [{**vars(m), "outcome": o[side], "by": "t"} for m, o in zip(mutants, outcomes, strict=True)]
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "judged").write_text(json.dumps({name_of(mutants[2]): {"verdict": "equivalent", "why": "same"}}))
    lines = page(tmp_path / "before", tmp_path / "after", tmp_path / "judged").splitlines()
    assert lines[2:5] == [
        "| x | 2 | 1 | 2 | 0 | 0 | 50% | 100% |",
        "| y | 2 | 0 | 0 | 1 | 1 | 0% | 0% |",
        "| all | 4 | 1 | 2 | 1 | 1 | 33% | 67% |",
    ]
    assert "- x/a.py: `1` → `2`: t" in lines
    assert "- y/a.py: `1` → `2`: same" in lines
    assert "- y/a.py: `1` → `2`: not looked at yet" in lines
    # The same mistakes, as if a reader had thought of them.
    rows = [json.loads(line) for line in (tmp_path / "after").read_text().splitlines()]
    rows[0]["new_test"] = True
    (tmp_path / "reader").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = of_a_reader(tmp_path / "reader", tmp_path / "judged").splitlines()
    assert lines[2:5] == [
        "| x | 2 | 2 | 1 | 0 | 0 | 100% |",
        "| y | 2 | 0 | 0 | 1 | 1 | 0% |",
        "| all | 4 | 2 | 1 | 1 | 1 | 67% |",
    ]
    assert "- y/a.py: `1` → `2`: same" in lines
    lines = of_a_second_reader(tmp_path / "reader", tmp_path / "judged").splitlines()
    assert lines[2:5] == [
        "| x | 2 | 1 | 2 | 0 | 0 | 50% | 100% |",
        "| y | 2 | 0 | 0 | 1 | 1 | 0% | 0% |",
        "| all | 4 | 1 | 2 | 1 | 1 | 33% | 67% |",
    ]
    assert "- x/a.py: `1` → `2`: t" in lines
