"""Loops over the steps, and tells the callbacks of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_ext.config.batch import global_batch_size
from megatron_ext.errors import StoppedBySignal
from megatron_ext.optim.curves import LearningRateCurve, WeightDecayCurve, learning_rate, weight_decay
from megatron_ext.optim.settings import set_rates
from megatron_ext.telemetry.metrics import Evaluated
from megatron_ext.train.extensions import Schedule
from megatron_ext.train.run import Run
from megatron_ext.train.step import BatchLoss, StepResult, train_step


class Trainer:
    """Runs steps until the planned end, or until a callback asks to stop. Everything else is a callback."""

    def __init__(self, run: Run, callbacks: Sequence[Callback], schedule: Schedule | None = None):
        self.run = run
        self._schedule = schedule
        self.callbacks = callbacks
        self.learning_rate_curve = LearningRateCurve.from_config(run.config)
        self.decoupled_curve = LearningRateCurve.decoupled(run.config)
        self.weight_decay_curve = WeightDecayCurve.from_config(run.config)
        self.stop_reason: str | None = None
        self.stopped_by_signal = False

    @property
    def finished(self) -> bool:
        """Whether the planned number of steps or samples is reached; with --skip-train, always."""
        training, state = self.run.config.training, self.run.state
        if training.skip_train:
            return True
        if training.train_samples is not None:
            # A last step that would need more samples than are left is not taken.
            return state.consumed_samples + self.next_batch_size > training.train_samples
        return state.iteration >= (training.train_iters or 0)

    @property
    def next_batch_size(self) -> int:
        """Return the number of samples of the next step."""
        return global_batch_size(self.run.config, self.run.state.consumed_samples)

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step: that of the flags, or what a user's own schedule makes of it."""
        samples = self.run.state.scheduled_samples
        rate = learning_rate(samples, self.learning_rate_curve)
        return rate if self._schedule is None else self._schedule(samples, rate)

    def stop(self, reason: str, *, by_signal: bool = False) -> None:
        """End the loop after this step. Every rank must call it at the same step."""
        self.stop_reason = self.stop_reason or reason
        self.stopped_by_signal = self.stopped_by_signal or by_signal

    def fit(self) -> None:
        """Train until the planned end, or until a callback asks to stop.

        Raises:
            StoppedBySignal: a signal ended the loop; the state has been saved where --save says so.
            NumericError: see `train_step`.
        """
        self._tell("on_start")
        try:
            while not self.finished and self.stop_reason is None:
                self._tell("on_step_begin")
                self._tell("on_step_end", self.step())
        except BaseException as error:
            self._tell("on_failure", error)
            raise
        # In the opposite order: save first, evaluate, and close the reports last, so that they hear of it all.
        for callback in reversed(self.callbacks):
            self.run.progress.phase = callback.phase
            callback.on_end(self)
        if self.stopped_by_signal:
            saved = self.run.config.checkpoint.save
            where = f"saved to {saved}; start again with --load {saved}" if saved else "nothing saved: no --save"
            raise StoppedBySignal(f"stopped at iteration {self.run.state.iteration}: {self.stop_reason}; {where}")

    def report_evaluation(self, metrics: Evaluated) -> None:
        """Hand the result of an evaluation to the callbacks; its time does not count as training."""
        self._tell("on_evaluation", metrics)

    def step(self) -> StepResult:
        """Take one optimizer step, counted in the state."""
        run, state = self.run, self.run.state
        batch = self.next_batch_size
        set_rates(
            run.optimizer,
            self.learning_rate,
            weight_decay(state.scheduled_samples, self.weight_decay_curve),
            None if self.decoupled_curve is None else learning_rate(state.scheduled_samples, self.decoupled_curve),
        )
        result = train_step(run, batch, lambda: self._tell("before_update"), lambda loss: self._tell("on_loss", loss))
        state.iteration += 1
        state.consumed_samples += batch
        state.consumed_tokens += result.tokens
        if result.updated:
            state.scheduled_samples += batch
            state.interval_loss += result.loss
            state.interval_losses += 1
        else:
            state.interval_skipped += 1
        state.interval_nan += math.isnan(result.loss)
        return result

    def _tell(self, event: str, *arguments: object) -> None:
        for callback in self.callbacks:
            self.run.progress.phase = callback.phase
            getattr(callback, event)(self, *arguments)


class Callback:
    """An extra of the loop: override what you need.

    Called on every rank, in the order of the list, so that collectives may be used.
    """

    phase = "a report or check"
    """What the rank does meanwhile, for the one who reads of a hang."""

    def on_start(self, trainer: Trainer) -> None:
        """Run before the first step; the state may come from a checkpoint."""

    def on_step_begin(self, trainer: Trainer) -> None:
        """Run before the microbatches of a step."""

    def before_update(self, trainer: Trainer) -> None:
        """Run within a step, when its gradients are there and the weights are still those that they belong to."""

    def on_loss(self, trainer: Trainer, loss: BatchLoss) -> None:
        """Run after `before_update`, when the loss over all ranks is known, be it NaN, and no weight has changed."""

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Run after a step; the state already counts it."""

    def on_evaluation(self, trainer: Trainer, metrics: Evaluated) -> None:
        """Run after an evaluation."""

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        """Run when an error ends the run. Other ranks may be gone, unless it is a NumericError, which every rank
        raises."""

    def on_end(self, trainer: Trainer) -> None:
        """Run after the last step of this process, unless an error ended it; in the reverse order of the list."""
