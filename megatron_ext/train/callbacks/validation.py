"""Evaluate every --eval-interval steps and at the end."""

from megatron_ext.telemetry.metrics import ValidationMetrics
from megatron_ext.train.evaluate import evaluate
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


class Validation(Callback):
    def __init__(self, interval: int):
        self.interval = interval
        self.evaluated_at: int | None = None

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if self.interval and trainer.run.state.iteration % self.interval == 0:
            self._evaluate(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.finished and self.evaluated_at != trainer.run.state.iteration:
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        state = trainer.run.state
        loss = evaluate(trainer.run)
        self.evaluated_at = state.iteration
        trainer.report_validation(
            ValidationMetrics(iteration=state.iteration, consumed_samples=state.consumed_samples, validation_loss=loss)
        )
