"""Evaluate on the validation data every --eval-interval steps and at the end; at the end on the test data too."""

from megatron_ext.telemetry.metrics import TestMetrics, ValidationMetrics
from megatron_ext.train.evaluate import evaluate
from megatron_ext.train.run import HeldOut
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


class Evaluation(Callback):
    """`valid` and `test` are None where there is no such data."""

    def __init__(self, valid: HeldOut | None, test: HeldOut | None, interval: int, *, at_start: bool):
        self.at_start = at_start
        self.valid = valid
        self.test = test
        self.interval = interval
        self.evaluated_at: int | None = None

    def on_start(self, trainer: Trainer) -> None:
        if self.at_start and trainer.run.state.iteration == 0:
            self._validate(trainer)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if self.interval and trainer.run.state.iteration % self.interval == 0:
            self._validate(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if not trainer.finished:
            return
        state = trainer.run.state
        if self.evaluated_at != state.iteration:
            self._validate(trainer)
        if self.test is not None:
            loss = evaluate(trainer.run, self.test)
            trainer.report_evaluation(
                TestMetrics(iteration=state.iteration, consumed_samples=state.consumed_samples, test_loss=loss)
            )

    def _validate(self, trainer: Trainer) -> None:
        if self.valid is None:
            return
        state = trainer.run.state
        loss = evaluate(trainer.run, self.valid)
        self.evaluated_at = state.iteration
        trainer.report_evaluation(
            ValidationMetrics(iteration=state.iteration, consumed_samples=state.consumed_samples, validation_loss=loss)
        )
