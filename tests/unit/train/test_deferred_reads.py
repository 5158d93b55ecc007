"""Steps whose numbers are read later, as on a GPU: they have the bits of others, and bad ones change nothing.

tests/distributed/test_deferred_reads.py compares whole runs on ranks.
"""

import math
from typing import Any

import pytest
import torch

from megatron_ext.errors import NumericError
from megatron_ext.train.deferred_reads import LateStep, LateSteps
from megatron_ext.train.run import Run
from megatron_ext.train.step import train_step
from megatron_ext.train.step_allreduce import StopVotes
from tests.support.small_runs import are_equal, built, weights

VOTES = StopVotes(0, 1, 0)


def _begin(run: Run, steps: LateSteps, before_update: Any = lambda: None) -> LateStep:
    for group in run.optimizer.param_groups:
        group["lr"] = 1e-2
    return steps.begin(range(4), VOTES, before_update)


@pytest.mark.parametrize("clip", ["0", "0.5", "100", "0.5 --mtp-num-layers 2"])
def test_a_late_step_has_the_bits_of_one_that_is_read_at_once(clip: str) -> None:
    """A gradient that is clipped is multiplied by the same share; a smaller one is left as it is."""
    flags = f"--clip-grad {clip} --hidden-dropout 0"
    with built(flags) as run:
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-2
        at_once = [train_step(run, range(4)) for _ in range(3)]
        expected = weights(run)
    with built(flags, reads_wait=True) as run:
        steps = LateSteps(run)
        late = [_begin(run, steps) for _ in range(3)]
        found = [step.result() for step in late]
        assert are_equal(weights(run), expected)
    assert found == [(step, VOTES) for step in at_once]


class Faulty:
    """A loss that is what `kind` says while it is `on`."""

    on = False

    def __init__(self, kind: str):
        self.kind = kind

    def __call__(self, token: Any) -> torch.Tensor:
        losses = token.cross_entropy()
        if not self.on:
            return losses
        if self.kind == "no gradient":
            return losses * 1e30
        return losses + (math.nan if self.kind == "NaN" else math.inf)


def _bad_gradient(run: Run, *, outside_norm: bool, value: float) -> Any:
    """Return a function that puts a number into a gradient; the engine leaves a shared weight out of the norm."""
    weight: Any = next(
        one for chunk in run.chunks for name, one in chunk.named_parameters() if "final_layernorm.weight" in name
    )
    if outside_norm:
        weight.shared = True

    def spoil() -> None:
        weight.main_grad[3] = value

    return spoil


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("outside_norm", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient_ends_the_run_whether_it_is_in_the_norm_or_not(
    value: float, outside_norm: bool, late: bool
) -> None:
    with built(reads_wait=late) as run:
        spoil = _bad_gradient(run, outside_norm=outside_norm, value=value)
        before = weights(run)
        take = (
            (lambda: _begin(run, LateSteps(run), spoil).result())
            if late
            else (lambda: train_step(run, range(4), spoil))
        )
        with pytest.raises(NumericError, match=r"gradient of decoder\.final_layernorm\.weight, iteration 1 "):
            take()
        assert are_equal(weights(run), before)


@pytest.mark.parametrize("kind", ["NaN", "infinity", "gradient"])
def test_from_a_bad_step_on_nothing_changes(kind: str) -> None:
    """The next step was begun before anybody has read of it; who goes on in spite of the error can."""
    loss = Faulty(kind)
    with built(reads_wait=True, loss=loss) as run:
        steps = LateSteps(run)
        _begin(run, steps).result()
        good = weights(run)
        loss.on = kind != "gradient"
        spoil = _bad_gradient(run, outside_norm=False, value=math.nan)
        bad = _begin(run, steps, spoil if kind == "gradient" else lambda: None)
        assert are_equal(weights(run), good)
        loss.on = False
        _begin(run, steps)
        assert are_equal(weights(run), good)
        with pytest.raises(NumericError, match=r"This iteration changed no weight"):
            bad.result()
        _begin(run, steps)
        assert not are_equal(weights(run), good)


def test_gradients_of_another_step_are_not_taken_for_those_of_the_bad_one() -> None:
    """The next step has its own by the time the numbers are read: that one of them is bad says nothing."""
    with built(reads_wait=True) as run:
        steps = LateSteps(run)
        spoil = _bad_gradient(run, outside_norm=True, value=math.nan)
        bad = _begin(run, steps, spoil)
        _begin(run, steps, spoil)
        with pytest.raises(NumericError, match=r"^the gradient became bad between the ranks: every rank's own part is"):
            bad.result()


def test_a_bad_step_changes_what_it_does_where_nothing_is_checked() -> None:
    with built("--no-check-for-nan-in-loss-and-grad", reads_wait=True) as run:
        spoil = _bad_gradient(run, outside_norm=False, value=math.nan)
        result, _ = _begin(run, LateSteps(run), spoil).result()
        assert result.updated
        assert any(bool(weight.isnan().any()) for weight in weights(run).values())
