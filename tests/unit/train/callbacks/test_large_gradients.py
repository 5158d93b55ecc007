"""--check-for-large-grads."""

from collections.abc import Sequence

import pytest

from megatron_ext.train.callbacks.large_gradients import LargeGradients
from megatron_ext.train.step import StepResult
from tests.support.bare_trainer import bare_trainer


def warned(norms: Sequence[float | None], capsys: pytest.CaptureFixture[str], rank: int = 0) -> list[str]:
    watch = LargeGradients()
    for step, norm in enumerate(norms, start=1):
        watch.on_step_end(bare_trainer(step, rank=rank), StepResult(1.0, 64, 4, norm is not None, norm, 1.0, None))
    return capsys.readouterr().err.splitlines()


def test_a_norm_ten_times_the_largest_of_the_first_hundred_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    first = [0.5] * 98 + [2.0, None, 0.5]  # a skipped step has no norm
    (warning,) = warned([*first, 19.9, 20.0, 3.0], capsys)
    assert "step 103: the gradient norm is 20, above 10 times the largest of the first 100 steps, 2;" in warning


def test_the_first_steps_and_other_ranks_warn_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert warned([0.5] * 50 + [100.0], capsys) == []
    assert warned([0.5] * 100 + [100.0], capsys, rank=1) == []
