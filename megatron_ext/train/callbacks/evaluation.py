"""Evaluates on the validation data every --eval-interval steps and at the end; at the end on the test data too."""

import torch

from megatron_ext.resilience.progress import EVALUATION
from megatron_ext.telemetry.metrics import SourceLoss, TestMetrics, ValidationMetrics
from megatron_ext.train.evaluate import evaluate, evaluate_sources
from megatron_ext.train.run import HeldOut
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer
from megatron_ext.untrusted.metrics_rows import read_rows


class Evaluation(Callback):
    """Evaluates; `valid` and `test` are None where there is no such data.

    A finished run that is started again evaluates only what its metrics file does not hold yet.
    """

    phase = EVALUATION

    def __init__(
        self,
        valid: HeldOut | None,
        test: HeldOut | None,
        interval: int,
        metrics_file: str | None,
        *,
        at_start: bool,
        first: int = 0,
    ):
        self.at_start = at_start
        self.first = first
        self.valid = valid
        self.test = test
        self.interval = interval
        self.metrics_file = metrics_file
        self.evaluated_at: int | None = None
        self.tested_at: int | None = None

    def on_start(self, trainer: Trainer) -> None:
        iteration = trainer.run.state.iteration
        if trainer.finished and iteration > 0 and not trainer.run.config.training.skip_train:
            known = self._known(trainer, iteration)
            self.evaluated_at = iteration if "validation_loss" in known else None
            self.tested_at = iteration if "test_loss" in known else None
        elif self.at_start and iteration == 0:
            self._validate(trainer)

    def ends_before_next(self, trainer: Trainer) -> bool:
        return self._is_due(trainer.position.iteration)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if self._is_due(trainer.run.state.iteration):
            self._validate(trainer)

    def _is_due(self, iteration: int) -> bool:
        return bool(self.interval) and iteration % self.interval == 0 and iteration >= self.first

    def on_end(self, trainer: Trainer) -> None:
        if not trainer.finished:
            return
        state = trainer.run.state
        if self.evaluated_at != state.iteration:
            self._validate(trainer)
        if self.test is not None and self.tested_at != state.iteration:
            loss = evaluate(trainer.run, self.test)
            trainer.report_evaluation(
                TestMetrics(iteration=state.iteration, consumed_samples=state.consumed_samples, test_loss=loss)
            )

    def _validate(self, trainer: Trainer) -> None:
        if self.valid is None:
            return
        state = trainer.run.state
        losses = evaluate_sources(trainer.run, self.valid)
        self.evaluated_at = state.iteration
        sources = [
            SourceLoss(name=part.name, suffix=part.suffix, loss=loss)
            for part, loss in zip(self.valid.parts, losses.parts, strict=True)
        ]
        trainer.report_evaluation(
            ValidationMetrics(
                iteration=state.iteration,
                consumed_samples=state.consumed_samples,
                validation_loss=losses.all,
                sources=tuple(sources) if len(sources) > 1 else (),
            )
        )

    def _known(self, trainer: Trainer, iteration: int) -> set[str]:
        """Return the fields of this iteration's rows in the metrics file, which the last rank writes. Collective."""
        fields: list[set[str]] = [set()]
        if trainer.run.is_last_rank and self.metrics_file is not None:
            rows = [row for row in read_rows(self.metrics_file) if row["iteration"] == iteration]
            fields = [{name for row in rows for name in row}]
        if trainer.run.world_size > 1:
            torch.distributed.broadcast_object_list(fields, src=trainer.run.world_size - 1)
        return fields[0]
