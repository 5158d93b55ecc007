"""--exit-signal-deadline: when a stop that takes too long is given up, by a clock of the test's, and who says so."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.resilience import deadline
from megatron_ext.resilience.deadline import StopDeadline
from megatron_ext.resilience.process_end import RunStatus


class End(Exception):
    """Stands for the end of the process."""


class Looks:
    """Is left after so many looks, each a tenth of a second later by its own clock."""

    def __init__(self, most: int) -> None:
        self.made, self._most = 0, most

    def monotonic(self) -> float:
        return 100.0 + self.made / 10.0

    def wait(self, seconds: float) -> bool:
        assert seconds == 0.1
        self.made += 1
        return self.made > self._most


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, int]]:
    """What the process ends with."""
    ends: list[tuple[str | None, int]] = []

    def end(text: str | None, code: int, *_: Any, **__: Any) -> None:
        ends.append((text, code))
        raise End

    monkeypatch.setattr(deadline, "end_from_thread", end)
    monkeypatch.setattr(deadline.exit_record, "wait_for_another", lambda save, seconds: True)
    return ends


def given_up_at(
    monkeypatch: pytest.MonkeyPatch, seconds: float, by_signals: float | None, by_watch: float | None, rank: int = 0
) -> float | None:
    """Return at what time a stop is given up; None where it is not within 20 s."""
    looks, signals = Looks(200), SimpleNamespace(terminated_at=by_signals, for_good=False)
    status: Any = RunStatus(rank=rank, iteration=7)
    status.watch = SimpleNamespace(terminated_at=by_watch)
    monkeypatch.setattr(deadline, "time", looks)
    made: Any = StopDeadline(seconds, signals, status, lambda: [3])  # pyright: ignore[reportArgumentType]
    made._left = looks
    try:
        made._run(seconds)
    except End:
        return looks.monotonic()
    return None


@pytest.mark.parametrize(
    ("seconds", "by_signals", "by_watch", "expected"),
    [
        (4.0, 101.0, None, 104.0),  # a second before the deadline, to end in
        (4.0, None, 101.0, 104.0),  # the main thread waits in C++: the watch alone has seen the signal
        (4.0, 105.0, 101.0, 104.0),
        (0.5, 101.0, None, 101.0),
        (4.0, None, None, None),
        (60.0, 101.0, None, None),
    ],
)
def test_a_stop_is_given_up_in_time(
    seconds: float,
    by_signals: float | None,
    by_watch: float | None,
    expected: float | None,
    said: list[tuple[str | None, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert given_up_at(monkeypatch, seconds, by_signals, by_watch) == (
        None if expected is None else pytest.approx(expected)
    )
    text = f"stopped at iteration 7: SIGTERM; --exit-signal-deadline {seconds:g} (seconds) is over"
    text += "; nothing saved: no --save"
    assert said == ([] if expected is None else [(text, 75)])


def test_one_rank_says_it(said: list[tuple[str | None, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline.exit_record, "is_there", lambda save: True)
    assert given_up_at(monkeypatch, 4.0, 101.0, None, rank=1) is not None
    assert said == [(None, 75)]
