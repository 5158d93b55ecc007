"""Who asks a run to stop, what all ranks make of it, and whether a restart of the launch goes on."""

import time
from pathlib import Path

import pytest

from megatron_ext.resilience.signals import SignalWatcher
from megatron_ext.train.callbacks.stopping import Stopping
from megatron_ext.train.step import StepResult
from megatron_ext.train.step_allreduce import StopVotes
from megatron_ext.train.trainer import Trainer
from tests.support.small_runs import built

RESULT = StepResult(1.0, 64, 4, True, 0.5, 1.0, None)

STOPS = [
    (None, None, False, None, None),
    ("SIGTERM", None, False, "SIGTERM", True),
    ("SIGTERM", None, True, "SIGTERM", False),
    ("SIGTERM", "SIGTERM", True, "SIGTERM", False),
    (None, "SIGTERM", True, "another rank was asked to stop", False),
    (None, "SIGTERM", False, "another rank was asked to stop", True),
    ("SIGINT", None, True, "SIGINT", True),
    (None, "the file stop", True, "another rank was asked to stop", True),
    ("SIGTERM", "the file stop", True, "SIGTERM", True),
    ("the file stop", "SIGTERM", True, "the file stop", True),
]
"""Who asks to stop on this rank, on another one; whether the run is elastic; and what follows: for good (a restart of
the launch does not go on), or until torchrun starts the ranks again."""


def test_all_ranks_stop_by_what_one_was_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two that SIGTERM asks are no other signal. A stop for good is noted for the next attempt of the launch."""
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "attempt_0" / "0" / "error.json"))
    with built() as run:
        for own, other, elastic, reason, for_good in STOPS:
            signals, trainer = SignalWatcher(reason=own), Trainer(run, [])
            callback = Stopping(signals, None, None, elastic=elastic)
            others = Stopping(SignalWatcher(reason=other), None, None, elastic=elastic).votes()
            trainer.stop_votes = StopVotes(*map(sum, zip(callback.votes(), others, strict=True)))
            callback.on_step_end(trainer, RESULT)
            case = (own, other, elastic)
            assert (trainer.stop_reason, trainer.stopped_by_signal) == (reason, reason is not None), case
            noted = tmp_path / "stop_asked.json"
            assert noted.exists() == bool(for_good), case
            if reason is not None:
                assert signals.for_good is for_good, case
            noted.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("asked", "minutes", "interval", "iteration", "reason"),
    [
        (None, 0.0, None, 7, "--exit-duration-in-mins is over"),
        (None, 60.0, None, 7, None),
        (None, None, 7, 7, "--exit-interval 7"),
        (None, None, 7, 14, "--exit-interval 7"),
        (None, None, 7, 8, None),
        (None, None, 0, 7, None),
        (None, 0.0, 7, 7, "--exit-duration-in-mins is over"),
        ("SIGTERM", 0.0, 7, 7, "SIGTERM"),
        ("SIGHUP", None, None, 7, "SIGHUP"),
    ],
)
def test_the_strongest_reason_is_the_one_that_is_told(
    asked: str | None, minutes: float | None, interval: int | None, iteration: int, reason: str | None
) -> None:
    """A rank that is alone looks at itself; another one's time that is over is told by its vote."""
    with built() as run:
        run.state.iteration = iteration
        trainer = Trainer(run, [])
        callback = Stopping(SignalWatcher(reason=asked), interval, minutes)
        callback.on_step_end(trainer, RESULT)
        assert (trainer.stop_reason, trainer.stopped_by_signal) == (reason, asked is not None)
        trainer = Trainer(run, [])
        trainer.stop_votes = StopVotes(overdue=1)
        Stopping(SignalWatcher(), None, None).on_step_end(trainer, RESULT)
        assert trainer.stop_reason == "--exit-duration-in-mins is over"


def test_a_rank_votes_for_one_kind_of_stop() -> None:
    votes = {
        reason: Stopping(SignalWatcher(reason=reason), None, 0.0).votes() for reason in (None, "SIGTERM", "SIGINT")
    }
    assert votes == {None: (0, 0, 1), "SIGTERM": (1, 0, 1), "SIGINT": (0, 1, 1)}
    assert Stopping(SignalWatcher(), None, None).votes() == StopVotes()


def test_the_deadline_is_in_minutes() -> None:
    deadline = Stopping(SignalWatcher(), None, 2.5).deadline
    assert deadline is not None
    assert 140.0 < deadline - time.monotonic() <= 150.0


def test_the_time_of_a_run_is_that_of_all_its_stages() -> None:
    signals = SignalWatcher()
    first = Stopping(signals, None, 60.0)
    time.sleep(0.01)
    assert Stopping(signals, None, 60.0).deadline == first.deadline
    assert Stopping(SignalWatcher(), None, 60.0).deadline != first.deadline
