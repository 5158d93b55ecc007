"""The loop by itself: rates, batches and counts of steps that grow and are skipped, its end, and who hears of it."""

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config.schema import Config, OptimizerConfig, TrainingConfig
from megatron_ext.errors import NumericError, StoppedBySignal
from megatron_ext.train import trainer as module
from megatron_ext.train.bad_step import _cause
from megatron_ext.train.gradient_watch import Finding
from megatron_ext.train.shared_numbers import StopVotes
from megatron_ext.train.state import TrainState
from megatron_ext.train.step import StepResult, _sum
from megatron_ext.train.trainer import Callback, Trainer

CONFIG = Config(
    training=TrainingConfig(global_batch_size=8, rampup_batch_size=(4, 4, 16), train_samples=40),
    optimizer=OptimizerConfig(
        lr=1.0,
        lr_decay_style="linear",
        lr_decay_samples=100,
        decoupled_lr=2.0,
        weight_decay=0.1,
        start_weight_decay=0.0,
        end_weight_decay=0.4,
        weight_decay_incr_style="linear",
    ),
)
"""Batches of 4 for 16 samples, then of 8. Rates that fall by a hundredth a sample, a decay that grows by one."""


def _trainer(config: Config = CONFIG, callbacks: list[Any] | None = None, schedule: Any = None) -> Trainer:
    groups = [
        {"params": [], "default_config": True, "wd_mult": 1.0},
        {"params": [], "default_config": False, "wd_mult": 0.0},
    ]
    run: Any = SimpleNamespace(
        config=config,
        state=TrainState(),
        optimizer=SimpleNamespace(param_groups=groups),
        progress=SimpleNamespace(phase=""),
        device=SimpleNamespace(reads_wait=False),
    )
    return Trainer(run, callbacks or [], schedule)


def _steps(monkeypatch: pytest.MonkeyPatch, trainer: Trainer, updated: list[bool]) -> list[tuple[Any, ...]]:
    """Take steps, some of which update nothing; return of each its batch, both rates, and both groups' decay."""
    seen: list[tuple[Any, ...]] = []

    def train_step(run: Any, batch: int, *_: Any) -> StepResult:
        ours, own = run.optimizer.param_groups
        seen.append((batch, ours["lr"], own["lr"], ours["weight_decay"], own["weight_decay"]))
        done = updated[len(seen) - 1]
        loss = float(len(seen)) if len(seen) != 4 else float("nan")
        return StepResult(loss, 10 * batch, batch, done, 0.5 if done else None, 1.0, None)

    monkeypatch.setattr(module, "train_step", train_step)
    for _ in updated:
        trainer.step()
    return seen


def test_skipped_steps_move_the_data_and_not_the_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The curves go by the samples of updates, whatever their batch; the batch and the end by the samples read."""
    trainer = _trainer()
    seen = _steps(monkeypatch, trainer, [True, False, True, True, False, True])
    progress = [0, 4, 4, 8, 12, 12]
    expected = [(1 - p / 100, 2 * (1 - p / 100), 0.4 * p / 40, 0.0) for p in progress]
    for found, batch, rates in zip(seen, [4, 4, 4, 4, 8, 8], expected, strict=True):
        assert found[0] == batch
        assert found[1:] == pytest.approx(rates, rel=1e-12)
    state = dataclasses.asdict(trainer.run.state)
    assert state.pop("interval_loss") != state.pop("interval_loss", 0.0), "the fourth loss was NaN"
    assert state == {
        "iteration": 6,
        "consumed_samples": 32,
        "consumed_tokens": 320,
        "scheduled_samples": 20,
        "interval_losses": 4,
        "interval_skipped": 2,
        "interval_nan": 1,
    }


def test_the_last_step_is_the_last_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer()
    _steps(monkeypatch, trainer, [True] * 5)
    assert (trainer.run.state.consumed_samples, trainer.finished) == (24, False)
    trainer.run.state.consumed_samples = 32
    assert not trainer.finished, "8 samples are left, and the batch is 8"
    trainer.run.state.consumed_samples = 33
    assert trainer.finished
    by_steps = dataclasses.replace(CONFIG.training, train_samples=None, train_iters=3, rampup_batch_size=None)
    trainer = _trainer(dataclasses.replace(CONFIG, training=by_steps))
    for iteration, finished in ((2, False), (3, True), (4, True)):
        trainer.run.state.iteration = iteration
        assert trainer.finished == finished


def test_a_schedule_of_ones_own_is_given_samples_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _trainer(schedule=lambda samples, rate: 1000.0 * samples + rate)
    seen = _steps(monkeypatch, trainer, [True, True])
    assert [found[1] for found in seen] == pytest.approx([1.0, 4000.96])


class _Listening(Callback):
    def __init__(self, name: str, heard: list[str], stops: tuple[tuple[str, bool], ...] = ()):
        self.name, self.heard, self.stops = name, heard, stops

    def on_start(self, trainer: Trainer) -> None:
        self.heard.append(f"{self.name} begins")

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        for reason, by_signal in self.stops:
            trainer.stop(reason, by_signal=by_signal)

    def on_end(self, trainer: Trainer) -> None:
        self.heard.append(f"{self.name} ends")


def test_the_first_reason_is_told_and_a_signal_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks end in the opposite order: what was begun first ends last."""
    heard: list[str] = []
    callbacks = [_Listening("first", heard, (("SIGTERM", True), ("a deadline", False))), _Listening("second", heard)]
    trainer = _trainer(callbacks=callbacks)
    trainer.run.config = dataclasses.replace(CONFIG)
    monkeypatch.setattr(module, "train_step", lambda run, batch, *_: StepResult(1.0, 8, batch, True, 0.5, 1.0, None))
    with pytest.raises(StoppedBySignal, match=r"stopped at iteration 1: SIGTERM; nothing saved: no --save"):
        trainer.fit()
    assert heard == ["first begins", "second begins", "second ends", "first ends"]


def test_losses_are_added_in_fp64() -> None:
    """fp32 counts to 2^24, tokens too: from there on one more is none."""
    losses = torch.tensor([[2.0**24, 2.0**24], [1.0, 1.0], [1.0, 1.0]])
    assert _sum(losses).tolist() == [2**24 + 2, 2**24 + 2]
    assert _sum(losses).dtype == torch.float64


def test_the_cause_is_what_a_backward_pass_comes_to_first_on_the_lowest_rank() -> None:
    early, late = Finding((0, 1), "early"), Finding((3, 0), "late")
    assert _cause([early, None, late, late]) == "rank 2: late"
    assert _cause([None, early]) == "rank 1: early"
    assert _cause([None, None]) is None


class _Device:
    """Stands in for `LateSteps`: it says which step was begun, and when its numbers were read."""

    def __init__(self, heard: list[str], bad: int | None = None):
        self.heard, self.bad, self.given = heard, bad, 0

    def begin(self, batch: int, votes: StopVotes, _before_update: Any) -> Any:
        self.given += 1
        self.heard.append(f"give {self.given}")
        return SimpleNamespace(result=partial(self._read, self.given, batch, votes))

    def _read(self, number: int, batch: int, votes: StopVotes) -> tuple[StepResult, StopVotes]:
        self.heard.append(f"read {number}")
        if number == self.bad:
            raise NumericError("bad")
        return StepResult(float(number), 10, batch, True, 0.5, 1.0, None), votes


class _Hearing(Callback):
    """Hears of the end of steps, and of some before the next begins."""

    def __init__(self, heard: list[str], at_once: int = 0, asks_at: int = 0):
        self.heard, self.at_once, self.asks_at, self.begun = heard, at_once, asks_at, 0

    def on_step_begin(self, trainer: Trainer) -> None:
        self.begun = trainer.run.state.iteration + 1

    def votes(self) -> StopVotes:
        return StopVotes(otherwise=int(self.begun == self.asks_at))

    def ends_before_next(self, trainer: Trainer) -> bool:
        return trainer.run.state.iteration == self.at_once

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        state = trainer.run.state
        assert (state.iteration, state.consumed_samples) == (result.loss, 8 * result.loss)
        assert (state.scheduled_samples, state.consumed_tokens) == (8 * result.loss, 10 * result.loss)
        self.heard.append(f"end {state.iteration}")
        assert trainer.stop_votes is not None
        if trainer.stop_votes.otherwise:
            trainer.stop("asked")


def _late(monkeypatch: pytest.MonkeyPatch, heard: list[str], callback: Callback, bad: int | None = None) -> Trainer:
    training = dataclasses.replace(CONFIG.training, train_samples=None, train_iters=4, rampup_batch_size=None)
    monkeypatch.setattr(module, "can_read_late", lambda run: True)
    monkeypatch.setattr(module, "LateSteps", lambda run: _Device(heard, bad))
    monkeypatch.setattr(module, "leaves_out", lambda run, batch: False)
    optimizer = dataclasses.replace(CONFIG.optimizer, lr_decay_samples=None, lr_decay_iters=100)
    return _trainer(dataclasses.replace(CONFIG, training=training, optimizer=optimizer), [callback])


def test_a_step_is_read_and_told_of_when_the_next_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    _late(monkeypatch, heard, _Hearing(heard, at_once=2)).fit()
    given = "give 1, give 2, read 1, end 1, read 2, end 2, give 3, give 4, read 3, end 3, read 4, end 4"
    assert ", ".join(heard) == given


def test_a_stop_that_is_read_late_ends_the_step_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    trainer = _late(monkeypatch, heard, _Hearing(heard, asks_at=2))
    trainer.fit()
    assert heard == ["give 1", "give 2", "read 1", "end 1", "give 3", "read 2", "end 2", "read 3", "end 3"]
    assert (trainer.stop_reason, trainer.run.state.iteration) == ("asked", 3)


def test_a_bad_step_that_is_read_late_leaves_the_state_of_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    trainer = _late(monkeypatch, heard, _Hearing(heard), bad=2)
    with pytest.raises(NumericError):
        trainer.fit()
    assert heard[-2:] == ["give 3", "read 2"]
    state = trainer.run.state
    assert (state.iteration, state.consumed_samples, state.scheduled_samples, state.consumed_tokens) == (1, 8, 8, 10)


def test_who_wants_the_loss_before_the_update_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wants(Callback):
        def on_loss(self, trainer: Trainer, loss: Any) -> None:
            """Look at the loss."""

    heard: list[str] = []
    trainer = _late(monkeypatch, heard, Wants())
    monkeypatch.setattr(module, "train_step", lambda run, batch, *_: StepResult(1.0, 8, batch, True, 0.5, 1.0, None))
    trainer.fit()
    assert not heard
