"""The tiers of CONTRIBUTING: which of them a run of pytest takes, and what it leaves out, said at its end.

bash tests/run.sh            the first: what no mark names
bash tests/run.sh --full     those that are marked full
bash tests/run.sh FILE       of a file or folder that is named, all but the slow ones
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

MARKS = ("slow", "full")
_FIRST, _NAMED = "not full and not slow", "not slow"
_EXPRESSIONS = {"quick": _FIRST, "full": "full and not slow", "slow": "slow", "all": ""}
_TOLD = "left_out"


def add_options(parser: pytest.Parser) -> None:
    """Add the options that choose a tier."""
    parser.addoption("--quick", action="store_true", help="run the first tier alone, also of files that are named")
    parser.addoption("--full", action="store_true", help="run the tests that are marked full, and no others")
    parser.addoption("--slow", action="store_true", help="run the tests that are marked slow, and no others")
    parser.addoption("--all", action="store_true", help="run the tests of all tiers")


def choose(config: pytest.Config) -> None:
    """Choose the tests of the tier that the command line asks for; an expression of its own, with -m, goes before."""
    asked = [expression for name, expression in _EXPRESSIONS.items() if config.getoption(f"--{name}")]
    if len(asked) > 1:
        raise pytest.UsageError("use one of --quick, --full, --slow and --all; --all runs every tier")
    if asked:
        [config.option.markexpr] = asked
    elif not config.option.markexpr:
        is_named = config.args_source is pytest.Config.ArgsSource.ARGS
        config.option.markexpr = _NAMED if is_named else _FIRST
    config.pluginmanager.register(LeftOut(config))


class LeftOut:
    """Counts the tests that the choice leaves out, here or, under pytest-xdist, in a worker, and says them."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._tests = Counter[str]()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        """Mark the cases that a test does not name as its first ones: before anything is chosen by marks."""
        cases: defaultdict[str, dict[str, pytest.Item]] = defaultdict(dict)
        for item in items:
            if item.get_closest_marker("first"):
                name, _, case = item.nodeid.partition("[")
                cases[name][case.removesuffix("]")] = item
        for name, of_test in cases.items():
            [first] = {mark.args for item in of_test.values() for mark in item.iter_markers("first")}
            if len(of_test) > 1 and not of_test.keys() >= {*first}:
                raise pytest.UsageError(f"{name} has no case {', '.join({*first} - of_test.keys())}")
            for case, item in of_test.items():
                if case not in first:
                    item.add_marker("full")

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._tests += Counter(_tier(item) for item in items)

    def pytest_sessionfinish(self) -> None:
        told: dict[str, Any] | None = getattr(self._config, "workeroutput", None)
        if told is not None:
            told[_TOLD] = dict(self._tests)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._tests |= Counter(getattr(node, "workeroutput", {}).get(_TOLD, {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for mark in reversed(MARKS):
            if self._tests[mark]:
                command = f"bash tests/run.sh --{mark}"
                terminalreporter.write_line(f"not run: {self._tests[mark]} tests that are marked {mark} ({command})")


def _tier(item: pytest.Item) -> str:
    return next((mark for mark in MARKS if item.get_closest_marker(mark)), "first")
