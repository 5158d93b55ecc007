"""The comparison of ranks: what is sent of a step, and what is said of a rank that is slow."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.plugins.rank_times.communication_clock import ComputeTime
from megatron_ext.plugins.rank_times.measures import Stragglers
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Trainer
from tests.support.small_runs import built

RESULT = StepResult(1.0, 64, 4, True, 0.5, 1.0, None)


class Clock:
    """Gives the compute times of the steps that the test says a device has passed."""

    def __init__(self, *known: list[int]):
        self.known = list(known)

    def take_compute(self) -> list[ComputeTime]:
        return [ComputeTime(float(step), step + 0.25, step + 0.5) for step in self.known.pop(0)]


def test_what_is_sent_are_the_two_steps_before() -> None:
    """Every second step; the first three, and those whose time is not known, are no numbers."""
    sent: list[list[float]] = []
    clock: Any = Clock([1], [2, 3], [4], [5, 6, 7, 8], [9])
    with built() as run:
        callback, trainer = Stragglers(clock, run), Trainer(run, [])
        callback.on_start(trainer)
        for run.state.iteration in range(1, 11):
            callback.on_step_end(trainer, RESULT)
            for exchange in callback._under_way if run.state.iteration % 2 == 0 else ():
                times = None
                while times is None:
                    times = exchange.times(run.device)
                sent.append(times.tolist())

    def times_of(*steps: int | None) -> list[float]:
        return [math.nan if step is None else step + part for step in steps for part in (0.25, 0.5)]

    expected = [times_of(None, None), times_of(None, None), times_of(4, None), times_of(6, 7), times_of(8, 9)]
    assert [str(one) for one in sent] == [str(one) for one in expected]


def _exchanged(ranks: int, *steps: list[float]) -> Any:
    """An exchange that is there: the compute times of each rank in two steps."""
    assert len(steps) == 2
    sent = torch.tensor([[[step[rank], math.nan] for step in steps] for rank in range(ranks)])
    return SimpleNamespace(times=lambda device: sent.double().flatten())


@pytest.mark.parametrize("last", [True, False])
def test_one_rank_says_who_became_slow_and_who_no_longer_is(last: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks that were slow are told of until the interval of the log ends."""
    run: Any = SimpleNamespace(world_size=3, is_last_rank=last, device=None)
    callback = Stragglers(None, run)  # pyright: ignore[reportArgumentType]
    callback._hosts = ["a", "b", "c"]
    callback._ranks = type(callback._ranks)([0, 0, 0])
    slow, well = [1.0, 2.0, 1.0], [1.0, 1.0, 1.0]
    for iteration in range(20):
        callback._under_way.append(_exchanged(3, slow, slow))
        callback._read(iteration)
    summary = callback.summary()
    assert summary is not None
    assert (summary["rank"], summary["slow"]) == (1, [1])
    for iteration in range(20, 60):
        callback._under_way.append(_exchanged(3, well, well))
        callback._read(iteration)
    summary = callback.summary()
    assert summary is not None
    assert summary["slow"] == [1]
    callback.forget()
    summary = callback.summary()
    assert summary is not None
    assert summary["slow"] == []
    said = capsys.readouterr().out
    assert said.count("rank 1 (b) computes 2.00 times as long as its peers") == int(last)
    assert said.count("rank 1 (b) computes as long as its peers again") == int(last)
