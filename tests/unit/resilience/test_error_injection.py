"""Injected errors: how often, at whom, and whether a step that is taken again fails again."""

import shlex

import pytest

from megatron_ext.errors import NumericError
from megatron_ext.resilience.error_injection import is_spoiled
from megatron_ext.train.configure import configure
from megatron_ext.train.step import train_step
from tests.support.small_runs import MODEL, are_equal, built, weights

STEPS = [range(start, start + 4) for start in range(0, 16_000, 4)]


def spoiled(flags: str, ranks: int = 4) -> list[tuple[int, int]]:
    """Return the first sample and the rank of each spoiled step."""
    config = configure([*MODEL, *shlex.split(flags)]).config
    return [(step.start, rank) for step in STEPS for rank in range(ranks) if is_spoiled(config, step, rank)]


def test_one_of_so_many_steps_of_a_rank_is_spoiled() -> None:
    found = spoiled("--error-injection-rate 50")
    assert len(found) == pytest.approx(4 * len(STEPS) / 50, rel=0.2)
    assert len({start for start, _ in found}) == len(found), "one rank of a step"
    assert {rank for _, rank in found} == {0, 1, 2, 3}
    assert spoiled("") == []
    assert spoiled("--error-injection-rate 50 --seed 5") != found


@pytest.mark.parametrize("kind", ["transient_error", "persistent_error", "correct_result"])
def test_only_a_transient_error_is_gone_after_a_restart(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"--error-injection-rate 20 --error-injection-type {kind}"
    first = spoiled(flags)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = spoiled(flags)
    assert (first == again) == (kind != "transient_error")
    assert len(set(first) & set(again)) < 0.2 * len(first) or kind != "transient_error"


def test_a_spoiled_step_changes_no_weight_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    with built("--error-injection-rate 1") as run:
        before = weights(run)
        with pytest.raises(NumericError, match=r"rank 0: NaN or infinity in the loss, iteration 1 \(samples from 0\)"):
            train_step(run, range(4))
        assert are_equal(weights(run), before)
    assert "warning: rank 0 injects an error into the step of the samples from 0\n" in capfd.readouterr().err


def test_it_needs_the_check_that_sees_it() -> None:
    flags = "--error-injection-rate 3 --no-check-for-nan-in-loss-and-grad"
    said = configure([*MODEL, *shlex.split(flags)]).typed.warnings
    assert any("--error-injection-rate" in text and "nobody looks" in text for text in said)
