"""Evaluates on the validation data every --eval-interval steps and at the end; at the end on the test data too.

Computes the loss on held-out data: the same samples at every evaluation, each token weighted once.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from megatron_ext.config.derived.batch_size import evaluation_batch, num_microbatches
from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.resilience.progress import EVALUATION
from megatron_ext.telemetry.metrics import SourceLoss, TestMetrics, ValidationMetrics
from megatron_ext.train.run import HeldOut, HeldOutPart, Run
from megatron_ext.train.step import StepResult, held_out_loss
from megatron_ext.train.trainer import Callback, Trainer
from megatron_ext.untrusted.metrics_rows import read_rows


@dataclass(frozen=True)
class HeldOutLoss:
    """The loss in nats per token, each token weighted once; NaN where none counts."""

    all: float
    parts: tuple[float, ...]
    """Loss of each source."""


def evaluate(run: Run, data: HeldOut) -> float:
    """Return the mean loss per token over the samples of `data`, in nats; NaN if no token counts."""
    return evaluate_sources(run, data).all


def evaluate_sources(run: Run, data: HeldOut) -> HeldOutLoss:
    """Return the mean loss per token over the samples of `data`, and over the samples of each source.

    The averaged weights are evaluated where the flags, or the optimizer, say so. The result is equal on every rank and
    in every layout. The last global batch of a source may be a remainder: it is filled up with samples whose tokens do
    not count.
    """
    for chunk in run.chunks:
        chunk.eval()
    optimizer = run.config.optimizer
    of_averages = (optimizer.ema_decay and optimizer.eval_ema) or traits_of(optimizer).averages
    with (
        run.sharding.averaged(run.optimizer, run.chunks) if of_averages else nullcontext(),
        run.gathered_parameters(),
        torch.no_grad(),
    ):
        sums = [_sum(run, data, part) for part in data.parts]
    for chunk in run.chunks:
        chunk.train()
    loss, tokens = (sum(values) for values in zip(*sums, strict=True))
    return HeldOutLoss(_mean(loss, tokens), tuple(_mean(*part) for part in sums))


def _sum(run: Run, data: HeldOut, part: HeldOutPart) -> tuple[float, int]:
    """Return the sum of the losses of one source, and the number of its tokens that count."""
    batch, micro_batch = evaluation_batch(run.config)
    loss_sum, total_tokens = 0.0, 0
    for start in range(part.positions.start, part.positions.stop, batch):
        count = num_microbatches(run.config, batch, micro_batch)
        with run.progress.loading():
            microbatches = data.loader.global_batch(start, count, end=part.positions.stop)
        run.progress.begin_batch(EVALUATION)
        loss, tokens = held_out_loss(run, microbatches)
        if tokens:
            loss_sum += loss * tokens
            total_tokens += tokens
    return loss_sum, total_tokens


def _mean(loss_sum: float, tokens: int) -> float:
    return loss_sum / tokens if tokens else math.nan


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
