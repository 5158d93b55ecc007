"""The loop over the steps of a real small run: rates, batches and counts, its end, and who hears of it when."""

import math
from typing import Any

import pytest
import torch

from megatron_ext.errors import NumericError, StoppedBySignal
from megatron_ext.train.run import Run
from megatron_ext.train.state import Position
from megatron_ext.train.step import StepResult
from megatron_ext.train.step_allreduce import StopVotes
from megatron_ext.train.trainer import Callback, Trainer
from tests.support.small_runs import built

GROWING = """
    --train-samples 40 --micro-batch-size 4 --global-batch-size 8 --rampup-batch-size 4 4 16
    --lr 1e-3 --lr-decay-style linear --lr-decay-samples 100 --decoupled-lr 2e-3 --untie-embeddings-and-output-weights
    --weight-decay 0.1 --start-weight-decay 0 --end-weight-decay 0.4 --weight-decay-incr-style linear
"""
"""Batches of 4 for 16 samples, then of 8. Rates that fall by a hundredth a sample, a decay that grows by one."""


class BadAt:
    """A loss that is NaN in one step of two microbatches."""

    def __init__(self, step: int):
        self.step, self.microbatches = step, 0

    def __call__(self, token: Any) -> torch.Tensor:
        self.microbatches += 1
        is_bad = (self.microbatches + 1) // 2 == self.step
        return token.cross_entropy() + (math.nan if is_bad else 0.0)


def _rates(run: Run) -> set[tuple[float, float, float]]:
    """Return the rate of each of the optimizer's groups as a share of the flag's, and its weight decay."""
    found = set()
    for group in run.optimizer.param_groups:
        of_ends = not group.get("default_config", True)
        found.add((of_ends, group["lr"] / (2e-3 if of_ends else 1e-3), group["weight_decay"]))
    return found


def test_skipped_steps_move_the_data_and_not_the_curves() -> None:
    """The curves go by the samples of updates, whatever their batch; the batch and the end by the samples read."""
    with built(f"{GROWING} --skip-samples 4-7 16-23", reads_wait=False) as run:
        trainer = Trainer(run, [])
        batches, updated = [], []
        for done in [0, 4, 4, 8, 12, 12]:
            result = trainer.step()
            batches.append(result.global_batch_size)
            updated.append(result.updated)
            rates = _rates(run)
            assert {of_ends for of_ends, _, _ in rates} == {False, True}
            assert [share for _, share, _ in rates] == pytest.approx([1 - done / 100] * len(rates), rel=1e-12)
            decays = sorted({decay for _, _, decay in rates})
            assert decays == pytest.approx(sorted({0.0, 0.4 * done / 40}), rel=1e-12)
    assert batches == [4, 4, 4, 4, 8, 8]
    assert updated == [True, False, True, True, False, True]
    assert run.state.position == Position(6, 32, 20)
    assert (run.state.interval_losses, run.state.interval_skipped, run.state.consumed_tokens) == (4, 2, 20 * 16)


def test_losses_of_an_interval_are_added_up_and_bad_ones_counted() -> None:
    flags = "--no-check-for-nan-in-loss-and-grad --train-iters 4 --skip-samples 8-11 --clip-grad 0 --lr 0 --min-lr 0"
    with built(flags, loss=BadAt(1)) as run:
        trainer = Trainer(run, [])
        first = trainer.step()
        assert math.isnan(first.loss)
        assert math.isnan(run.state.interval_loss)
        assert (run.state.interval_losses, run.state.interval_skipped, run.state.interval_nan) == (1, 0, 1)
        run.state.start_interval()
        for group in run.optimizer.param_groups:  # NaN gradients have left NaN in the averages and weights
            for weight in group["params"]:
                weight.data.nan_to_num_()
        losses = [trainer.step().loss for _ in range(2)]
        assert losses[1] == 0.0, "its samples are all left out"
        assert run.state.interval_loss == losses[0]
        assert (run.state.interval_losses, run.state.interval_skipped, run.state.interval_nan) == (1, 1, 0)


def test_the_last_step_is_the_last_whole_one() -> None:
    with built(GROWING) as run:
        trainer = Trainer(run, [])
        for samples, finished in ((24, False), (32, False), (33, True)):
            run.state.consumed_samples = samples
            assert trainer.finished == finished, samples
    with built("--train-iters 3") as run:
        trainer = Trainer(run, [])
        for run.state.iteration, finished in ((2, False), (3, True), (4, True)):
            assert trainer.finished == finished
    with built("--train-iters 3 --skip-train") as run:
        assert Trainer(run, []).finished


def test_a_schedule_of_ones_own_is_given_samples_and_rate() -> None:
    with built("--lr-decay-style constant") as run:
        trainer = Trainer(run, [], lambda samples, rate: samples * 1e-4 + rate)
        rates = []
        for _ in range(2):
            trainer.step()
            rates.append(run.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([1e-2, 1e-2 + 4e-4])


class Hears(Callback):
    """Writes down what it hears of; asks and stops where it is told to."""

    def __init__(self, heard: list[str], name: str = "", *, at_once: int = 0, asks_at: int = 0, stops: Any = ()):
        self.heard, self.name, self.at_once, self.asks_at, self.stops = heard, name, at_once, asks_at, stops
        self.begun = 0

    def on_start(self, trainer: Trainer) -> None:
        if self.name:
            self.heard.append(f"{self.name} begins")

    def on_step_begin(self, trainer: Trainer) -> None:
        self.begun = trainer.position.iteration + 1
        if not self.name:
            self.heard.append(f"begin {self.begun}")

    def votes(self) -> StopVotes:
        return StopVotes(otherwise=int(self.begun == self.asks_at))

    def ends_before_next(self, trainer: Trainer) -> bool:
        return trainer.position.iteration == self.at_once

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        state = trainer.run.state
        assert state.position == Position(state.iteration, 4 * state.iteration, 4 * state.iteration)
        assert state.consumed_tokens == 64 * state.iteration
        if not self.name:
            self.heard.append(f"end {state.iteration}")
        for reason, by_signal in self.stops:
            trainer.stop(reason, by_signal=by_signal)
        if trainer.stop_votes is not None and trainer.stop_votes.otherwise:
            trainer.stop("asked")

    def on_end(self, trainer: Trainer) -> None:
        if self.name:
            self.heard.append(f"{self.name} ends")


def test_the_first_reason_is_told_and_a_signal_is_not_forgotten() -> None:
    """Callbacks end in the opposite order: what was begun first ends last."""
    heard: list[str] = []
    stops = (("SIGTERM", True), ("a deadline", False))
    with built() as run:
        trainer = Trainer(run, [Hears(heard, "first", stops=stops), Hears(heard, "second")])
        with pytest.raises(StoppedBySignal, match=r"stopped at iteration 1: SIGTERM; nothing saved: no --save"):
            trainer.fit()
    assert heard == ["first begins", "second begins", "second ends", "first ends"]


def _told(heard: list[str], flags: str = "", *, callbacks: Any = (), loss: Any = None, **asks: Any) -> Trainer:
    """Train four steps on a device whose reads wait; return the trainer as it was at the end or at a numeric error."""
    with built(f"--train-iters 4 {flags}", reads_wait=True, loss=loss) as run:
        trainer = Trainer(run, [Hears(heard, **asks), *callbacks])
        try:
            trainer.fit()
        except NumericError:
            heard.append("error")
    return trainer


def test_a_step_is_read_and_told_of_when_the_next_is_under_way() -> None:
    heard: list[str] = []
    _told(heard, at_once=2)
    assert ", ".join(heard) == "begin 1, begin 2, end 1, end 2, begin 3, begin 4, end 3, end 4"


def test_a_stop_that_is_read_late_ends_the_step_under_way() -> None:
    heard: list[str] = []
    trainer = _told(heard, asks_at=2)
    assert heard == ["begin 1", "begin 2", "end 1", "begin 3", "end 2", "end 3"]
    assert (trainer.stop_reason, trainer.run.state.iteration) == ("asked", 3)


def test_a_bad_step_that_is_read_late_leaves_the_state_of_before_it() -> None:
    heard: list[str] = []
    trainer = _told(heard, loss=BadAt(2))
    assert heard[-2:] == ["begin 3", "error"]
    assert trainer.run.state.position == Position(1, 4, 4)
    assert trainer.run.state.consumed_tokens == 64


class WantsTheLoss(Callback):
    """Looks at the loss before the update."""

    def on_loss(self, trainer: Trainer, loss: Any) -> None:
        """Look at the loss."""


@pytest.mark.parametrize("flags", ["--check-before-update", "--log-num-zeros-in-grad", ""])
def test_who_wants_the_numbers_before_the_update_gets_them(flags: str) -> None:
    """A flag that needs them, or a callback that hears of the loss; samples that are left out compute nothing."""
    heard: list[str] = []
    _told(heard, flags, callbacks=() if flags else (WantsTheLoss(),))
    assert ", ".join(heard) == "begin 1, end 1, begin 2, end 2, begin 3, end 3, begin 4, end 4"
