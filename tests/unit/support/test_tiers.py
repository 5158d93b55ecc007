"""Which tests a run takes, and that it says which it has left out."""

from collections.abc import Callable
from pathlib import Path

import pytest

CONFTEST = """
from tests.support import tiers

def pytest_addoption(parser):
    tiers.add_options(parser)

def pytest_configure(config):
    for mark in (*tiers.MARKS, "first"):
        config.addinivalue_line("markers", mark)
    tiers.choose(config)
"""
FILE = """
import pytest

def test_first(): print("ran first")

@pytest.mark.full
def test_full(): print("ran full")

@pytest.mark.slow
@pytest.mark.full
def test_slow(): print("ran slow")
"""
CASES = """
import pytest

@pytest.mark.first("b c")
@pytest.mark.parametrize("case", ["a", "b c", pytest.param("d", marks=pytest.mark.slow)])
def test_cases(case): print("ran", case)
"""
NO_FULL, NO_SLOW = (
    f"not run: 1 tests that are marked {mark} (bash tests/run.sh --{mark})" for mark in ("full", "slow")
)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs pytest in a folder with a test of each tier, and returns what it prints."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_tiers.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> str:
        options = ["-q", "-s", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={tmp_path}"]
        assert pytest.main([*options, *words]) == code
        said = capsys.readouterr()
        return said.out + said.err

    return run


@pytest.mark.parametrize(
    ("words", "ran", "said"),
    [
        ((), {"first"}, {NO_FULL, NO_SLOW}),
        (("test_tiers.py",), {"first", "full"}, {NO_SLOW}),
        (("--quick", "test_tiers.py"), {"first"}, {NO_FULL, NO_SLOW}),
        (("--full",), {"full"}, {NO_SLOW}),
        (("--slow",), {"slow"}, {NO_FULL}),
        (("--all",), {"first", "full", "slow"}, set()),
        (("-m", "full"), {"full", "slow"}, set()),
    ],
)
@pytest.mark.first(*(f"one process-words{n}-ran{n}-said{n}" for n in range(7)), "workers-words0-ran0-said0")
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "workers"])
def test_a_run_takes_its_tier_and_says_what_it_leaves_out(
    workers: tuple[str, ...], words: tuple[str, ...], ran: set[str], said: set[str], run: Callable[..., str]
) -> None:
    printed = run(*workers, *words)
    assert {line for line in printed.splitlines() if line.startswith("not run")} == said
    assert f"{len(ran)} passed" in printed
    if not workers:
        assert {tier for tier in ("first", "full", "slow") if f"ran {tier}" in printed} == ran


def test_two_tiers_at_once_are_refused(run: Callable[..., str]) -> None:
    assert "use one of --quick, --full, --slow and --all" in run("--full", "--slow", code=pytest.ExitCode.USAGE_ERROR)


def test_of_a_test_with_parameters_some_cases_are_the_first(run: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "test_tiers.py").unlink()
    (tmp_path / "test_cases.py").write_text(CASES)
    for words, ran in (((), {"b c"}), (("--full",), {"a"}), (("--slow",), {"d"}), (("test_cases.py",), {"a", "b c"})):
        printed = run(*words)
        assert {case for case in ("a", "b c", "d") if f"ran {case}\n" in printed} == ran
    (tmp_path / "test_cases.py").unlink()
    (tmp_path / "test_names.py").write_text(CASES.replace('first("b c")', 'first("b")'))
    assert "test_names.py::test_cases has no case b" in run(code=pytest.ExitCode.USAGE_ERROR)
