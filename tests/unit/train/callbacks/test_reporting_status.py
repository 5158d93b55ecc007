"""The step that the report of a failure names."""

from typing import Any

import pytest

from megatron_ext.errors import NumericError
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.train.callbacks.reporting import Status
from megatron_ext.train.trainer import Callback, Trainer
from tests.support.small_runs import built


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
