"""`--file-times`: what each test file costs, in seconds of a processor.

A busy machine makes every test wait, and tests of ranks wait for each other; what they make processors do is the same.
"""

import contextlib
from collections import defaultdict
from collections.abc import Generator

import psutil
import pytest

_SECONDS = "seconds of a processor"


class FileTimes:
    """Counts the seconds that tests, and all processes they start and wait for, compute; prints them by file."""

    def __init__(self) -> None:
        self._of_file: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None]:
        item.stash[_BEFORE] = _computed()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None]:
        try:
            return (yield)
        finally:  # the report of the teardown, which a worker sends, takes it along
            item.user_properties.append((_SECONDS, max(0.0, _computed() - item.stash[_BEFORE])))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self._of_file[report.location[0]]
        row[1] += report.duration
        if report.when == "teardown":
            row[0] += float(dict(report.user_properties).get(_SECONDS, 0.0))  # pyright: ignore[reportArgumentType]
            row[2] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds of a processor, seconds, tests of each file")
        for file, (computed, passed, tests) in sorted(self._of_file.items(), key=lambda row: -row[1][0]):
            terminalreporter.write_line(f"{computed:8.1f} {passed:8.1f} {tests:5.0f}  {file}")
        total = (sum(column) for column in zip(*self._of_file.values(), strict=True))
        terminalreporter.write_line("{:8.1f} {:8.1f} {:5.0f}  all".format(*total))


_BEFORE = pytest.StashKey[float]()


def _computed() -> float:
    """Return the seconds that this process, its descendants, and those whose end they have seen, have computed."""
    process = psutil.Process()
    found = 0.0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            found += sum(one.cpu_times()[:4])
    return found
