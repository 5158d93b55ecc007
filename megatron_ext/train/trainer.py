"""Loops over the steps, and tells the callbacks of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.config.derived.batch_size import global_batch_size, training_steps
from megatron_ext.errors import ConfigurationError, StoppedBySignal
from megatron_ext.optim.curves import LearningRateCurve, Schedule, WeightDecayCurve, learning_rate, weight_decay
from megatron_ext.optim.settings import set_rates
from megatron_ext.telemetry.metrics import Evaluated, SaveFailure
from megatron_ext.train.deferred_reads import Guard, can_read_late
from megatron_ext.train.run import Run
from megatron_ext.train.state import Position
from megatron_ext.train.step import BatchLoss, StepResult, TakenStep, train_step
from megatron_ext.train.step_allreduce import StopVotes


@dataclass(frozen=True)
class _UnderWay:
    """A step that was begun and has not ended."""

    after: Position
    step: TakenStep


class Trainer:
    """Runs steps until the planned end, or until a callback asks to stop. Everything else is a callback.

    On a GPU the numbers of a step are read when the next one is under way (train/deferred_reads.py), unless a callback
    wants them before the update (`on_loss`) or the end of the step before the next (`ends_before_next`).
    """

    def __init__(self, run: Run, callbacks: Sequence[Callback], schedule: Schedule | None = None):
        self.run = run
        self._schedule = schedule
        self.callbacks = callbacks
        self.learning_rate_curve = LearningRateCurve.from_config(run.config)
        self.decoupled_curve = LearningRateCurve.decoupled(run.config)
        self.weight_decay_curve = WeightDecayCurve.from_config(run.config)
        self._steps = training_steps(run.config)
        self.stop_reason: str | None = None
        self.stopped_by_signal = False
        self.stop_votes: StopVotes | None = None
        """Votes of all ranks in the step that has ended; None where they were not asked in it."""
        wants_loss = any(_overrides(callback, "on_loss") for callback in callbacks)
        self._guard = Guard(run) if can_read_late(run) and not wants_loss else None
        self._newest: _UnderWay | None = None

    @property
    def position(self) -> Position:
        """Position at which the next step begins: after the steps that are under way, which `run.state` does not count
        yet."""
        return self.run.state.position if self._newest is None else self._newest.after

    @property
    def finished(self) -> bool:
        """Whether the planned number of steps or samples is reached; with --skip-train, always."""
        training, position = self.run.config.training, self.position
        if training.skip_train:
            return True
        if training.train_samples is not None:
            # A last step that would need more samples than are left is not taken.
            return position.consumed_samples + self.next_batch_size > training.train_samples
        return position.iteration >= self._steps

    @property
    def next_batch_size(self) -> int:
        """Return the number of samples of the next step."""
        return global_batch_size(self.run.config, self.position.consumed_samples)

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the step that follows those in `run.state`."""
        return self._rate(self.run.state.scheduled_samples)

    def _rate(self, samples: int) -> float:
        """Return the learning rate after so many samples: the flags' rate, or the rate that a user's own schedule makes
        of it."""
        rate = learning_rate(samples, self.learning_rate_curve)
        return rate if self._schedule is None else _checked_rate(self._schedule(samples, rate), samples)

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
        self._call_callbacks("on_start")
        try:
            self._take_steps()
        except BaseException as error:
            self._call_callbacks("on_failure", error)
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
        self._call_callbacks("on_evaluation", metrics)

    def report_save_failure(self, failure: SaveFailure) -> None:
        """Hand a save that failed to the callbacks, where the run goes on without it."""
        self._call_callbacks("on_save_failure", failure)

    def step(self) -> StepResult:
        """Take one optimizer step, counted in the state."""
        return self._end(self.begin_step(), tells=False)

    def _take_steps(self) -> None:
        while not self.finished and self.stop_reason is None:
            self._call_callbacks("on_step_begin")
            before = self._newest
            step = self.begin_step()
            if before is not None:
                self._end(before)
            if self._ends_before_next():
                self._end(step)
        if self._newest is not None:
            self._end(self._newest)

    def begin_step(self) -> _UnderWay:
        """Begin the step that follows those under way."""
        run, before, batch = self.run, self.position, self.next_batch_size
        samples = range(before.consumed_samples, before.consumed_samples + batch)
        set_rates(
            run.optimizer,
            self._rate(before.scheduled_samples),
            weight_decay(before.scheduled_samples, self.weight_decay_curve),
            None if self.decoupled_curve is None else learning_rate(before.scheduled_samples, self.decoupled_curve),
        )
        step = train_step(
            run,
            samples,
            lambda: self._call_callbacks("before_update"),
            lambda loss: self._call_callbacks("on_loss", loss),
            guard=self._guard,
            votes=None if self._guard is None else self._own_votes(),
        )
        self._newest = _UnderWay(before.after(batch, updated=step.updated), step)
        return self._newest

    def _end(self, under_way: _UnderWay, *, tells: bool = True) -> StepResult:
        """Count a step in the state, and tell the callbacks."""
        state = self.run.state
        try:
            result, self.stop_votes = under_way.step.result()
        except BaseException:
            self._newest = None  # one that was begun after a bad step changes nothing
            raise
        if under_way is self._newest:
            self._newest = None
        state.position = under_way.after
        state.consumed_tokens += result.tokens
        if result.updated:
            state.interval_loss += result.loss
            state.interval_losses += 1
        else:
            state.interval_skipped += 1
        state.interval_nan += math.isnan(result.loss)
        if tells:
            self._call_callbacks("on_step_end", result)
        return result

    def _ends_before_next(self) -> bool:
        """Return whether the step that was begun has to end, to the callbacks too, before the next is begun."""
        if self._guard is None:
            return True
        return any(_overrides(one, "on_step_end") and one.ends_before_next(self) for one in self.callbacks)

    def _own_votes(self) -> StopVotes:
        votes = [callback.votes() for callback in self.callbacks]
        return next((vote for vote in votes if vote is not None), StopVotes())

    def _call_callbacks(self, event: str, *arguments: object) -> None:
        for callback in self.callbacks:
            self.run.progress.phase = callback.phase
            getattr(callback, event)(self, *arguments)


class Callback:
    """An extra of the loop: override what you need.

    Called on every rank, in the order of the list, so that collectives may be used. `trainer.run.state` counts the
    steps that have ended; `trainer.position` also the steps that are under way.
    """

    phase = "a report or check"
    """Activity of the rank during the callback, named in the report of a hang."""

    def on_start(self, trainer: Trainer) -> None:
        """Run before the first step; the state may come from a checkpoint."""

    def on_step_begin(self, trainer: Trainer) -> None:
        """Run before the microbatches of a step, which begins at `trainer.position`."""

    def before_update(self, trainer: Trainer) -> None:
        """Run within a step, when its gradients are computed and the weights not yet updated."""

    def on_loss(self, trainer: Trainer, loss: BatchLoss) -> None:
        """Run after `before_update`, when the loss over all ranks is known, be it NaN, and no weight has changed."""

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Run after a step; the state already counts it. See `ends_before_next`."""

    def ends_before_next(self, trainer: Trainer) -> bool:
        """Return whether `on_step_end` must run before the next step begins; `trainer.position` counts the step.

        If not, a GPU may have the next step by then, and its weights, gradients and random numbers may be later ones,
        while result and state belong to the step that `on_step_end` is told of.
        """
        return True

    def votes(self) -> StopVotes | None:
        """Return whether this rank asks to stop; None if the callback does not decide that. `Trainer.stop_votes` then
        has the votes of all ranks in `on_step_end`."""
        return None

    def on_evaluation(self, trainer: Trainer, metrics: Evaluated) -> None:
        """Run after an evaluation."""

    def on_save_failure(self, trainer: Trainer, failure: SaveFailure) -> None:
        """Run after a save that failed, where the run goes on without it, on every rank."""

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        """Run when an error ends the run. Other ranks may be gone, unless it is a NumericError, which every rank
        raises."""

    def on_end(self, trainer: Trainer) -> None:
        """Run after the last step of this process, unless an error ended it; in the reverse order of the list."""

    def close(self) -> None:
        """Give back what the callback holds, threads and files, where the process goes on after the run. It is called
        last, after an error too, when other ranks may be gone: it must not communicate."""


def _checked_rate(rate: object, samples: int) -> float:
    """Return the rate of a user's own schedule as a float.

    Raises:
        ConfigurationError: it is no rate.
    """
    try:
        number = float(rate)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 <= number < math.inf:
        raise ConfigurationError(
            f"learning_rate= returned {rate!r} after {samples} samples: it must return a number of at least 0"
        )
    return number


def _overrides(callback: object, event: str) -> bool:
    return getattr(type(callback), event, None) is not getattr(Callback, event)
