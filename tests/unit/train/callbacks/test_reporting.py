"""What a real small run reports of its steps: losses, counts and rates of the intervals between two lines.

tests/distributed/test_metrics_of_layouts.py compares norms of layouts.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import NumericError
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.telemetry.metrics import StepMetrics
from megatron_ext.train.callbacks import reporting
from megatron_ext.train.callbacks.reporting import Reporting, Status
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer
from tests.support.patched_in_one_module import replace_in
from tests.support.small_runs import MODEL, built


def _rows(path: Path, *flags: str, **own: Any) -> tuple[list[dict[str, Any]], Any]:
    """Train; return the rows of steps in the metrics file, and what the run returned."""
    trained = pretrain([*MODEL, "--eval-iters", "0", "--metrics-file", str(path), *flags], **own)
    return [row for row in map(json.loads, path.read_text().splitlines()) if "lm_loss" in row], trained


def test_a_line_begins_anew_after_the_last(tmp_path: Path) -> None:
    """The first step has one of its own; each number after a line is of the steps since."""
    flags = ["--train-iters", "7", "--log-interval", "3"]
    decays = ["--weight-decay-incr-style", "linear", "--start-weight-decay", "0", "--end-weight-decay", "0.7"]
    rows, trained = _rows(tmp_path / "rows.jsonl", *flags, *decays)
    losses = trained.losses
    assert [row["iteration"] for row in rows] == [1, 3, 6]
    assert [row["lm_loss"] for row in rows] == [losses[0], sum(losses[1:3]) / 2, sum(losses[3:6]) / 3]
    assert [(row["consumed_samples"], row["consumed_tokens"]) for row in rows] == [(4, 64), (12, 192), (24, 384)]
    assert [row["weight_decay"] for row in rows] == pytest.approx([0.1, 0.3, 0.6])
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(64 / (row["elapsed_ms"] / 1000.0))


def test_skipped_steps_are_counted_and_have_no_loss_in_the_mean(tmp_path: Path) -> None:
    """An interval without any update has its last step's loss."""
    flags = ["--train-iters", "6", "--log-interval", "2", "--skip-samples", "4-7", "16-23"]
    rows, trained = _rows(tmp_path / "rows.jsonl", *flags)
    first, *_ = trained.losses
    assert [(row["iteration"], row["skipped_iterations"]) for row in rows] == [(1, 0), (2, 1), (4, 0), (6, 2)]
    assert (rows[0]["lm_loss"], rows[1]["lm_loss"], rows[3]["lm_loss"]) == (first, 0.0, 0.0)


def test_the_norm_of_the_weights_is_that_of_the_model(tmp_path: Path) -> None:
    rows, trained = _rows(tmp_path / "rows.jsonl", "--log-params-norm", "--log-interval", "1", returns_model=True)
    squares = sum(float(weight.detach().double().square().sum()) for weight in trained.model[0].parameters())
    assert rows[-1]["params_norm"] == pytest.approx(math.sqrt(squares), rel=1e-7)


class Sink:
    """Keeps what is written to it."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    def write(self, metrics: Any) -> None:
        self.written.append(metrics)

    def close(self) -> None:
        self.written.append("closed")


def test_sinks_of_steps_get_the_step_alone() -> None:
    steps, log = Sink(), Sink()
    with built("--train-iters 6") as run:
        Trainer(run, [Reporting([steps], 2, [log], 3)]).fit()
    of_steps: list[StepMetrics] = steps.written[:-1]
    of_log: list[StepMetrics] = log.written[:-1]
    assert (steps.written[-1], log.written[-1]) == ("closed", "closed")
    assert [row.iteration for row in of_steps] == [2, 4, 6]
    assert [row.iteration for row in of_log] == [1, 3, 6]
    assert of_steps[2].lm_loss != of_log[2].lm_loss, "a step's own loss, and the mean of three"
    for row in of_steps:
        assert row.tokens_per_second == pytest.approx(64 / (row.elapsed_ms / 1000.0))


def test_the_seconds_of_steps_that_overlap_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The third step begins after a pause of 100 seconds in which something else was done."""
    now = [0.0]
    replace_in(monkeypatch, reporting, "time", perf_counter=lambda: now[0], process_time=lambda: now[0] / 2)
    log, result = Sink(), StepResult(1.0, 64, 4, True, 0.5, 1.0, None)
    heard = [("begin", 1.0), ("begin", 2.0), ("end", 1.0), ("end", 3.0), ("pause", 100.0), ("begin", 1.0), ("end", 5.0)]
    with built() as run:
        trainer, report = Trainer(run, []), Reporting([], 1000, [log], 4)
        run.state.iteration = 2
        for event, seconds in heard:
            if event == "begin":
                report.on_step_begin(trainer)
            now[0] += seconds
            if event == "end":
                run.state.iteration = 4 if seconds == 5.0 else 3
                report.on_step_end(trainer, result)
    [row] = log.written
    assert row.iteration == 4
    assert row.elapsed_ms == pytest.approx(1000.0 * 13.0 / 3)
    assert row.cpu_ms == pytest.approx(500.0 * 13.0 / 3), "the processor worked half of the time"


class OwnError(Exception):
    """What a user's own code raises."""


class FailsIn(Callback):
    """Fails in one of the events of the third step."""

    def __init__(self, event: str):
        self.event = event

    def before_update(self, trainer: Any) -> None:
        if self.event == "the step" and trainer.position.iteration == 2:
            raise OwnError

    def ends_before_next(self, trainer: Any) -> bool:
        return False

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if self.event == "its end" and trainer.run.state.iteration == 2:
            raise OwnError


class BadLoss:
    """A loss that is infinite in the third step of two microbatches."""

    calls = 0

    def __call__(self, token: Any) -> Any:
        self.calls += 1
        return token.cross_entropy() + (float("inf") if self.calls in (5, 6) else 0.0)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("event", ["the step", "its end", "its loss"])
def test_a_failure_is_that_of_the_step_that_was_not_done(event: str, late: bool) -> None:
    """Where numbers are read late, the step after it was begun."""
    status = RunStatus(0)
    loss = BadLoss() if event == "its loss" else None
    with built("--train-iters 5", reads_wait=late, loss=loss) as run, pytest.raises((OwnError, NumericError)):
        Trainer(run, [Status(status), FailsIn(event)]).fit()
    # The end of the second step fails when the third is the one to come, or under way.
    assert status.iteration == (2 if event == "its end" and not late else 3)
