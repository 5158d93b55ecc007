"""The planner's times against published runs: fails when they get worse. docs/planner.md has the table."""

import pytest

from benchmarks.planner import HELD_OUT, foundry, published, ratios, summary

RUNS = published()


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return ratios(RUNS)


def test_estimates_are_near_what_was_published(found: dict[str, float]) -> None:
    mean, bias, worst = summary(found.values())
    assert len(found) == 43
    assert mean <= 0.05
    assert 0.98 <= bias <= 1.02
    assert abs(worst) <= 0.2


def test_runs_that_no_fit_has_seen() -> None:
    """Other rows of the same tables; their flags and seconds were written down after the last fit."""
    runs = published(HELD_OUT)
    assert not {run.name for run in runs} & {run.name for run in RUNS}
    mean, bias, worst = summary(ratios(runs).values())
    assert len(runs) == 25
    assert mean <= 0.05
    assert 0.97 <= bias <= 1.03
    assert abs(worst) <= 0.16


@pytest.mark.parametrize(("device", "most"), [("a100", 0.06), ("h100", 0.07), ("h100-96-500w", 0.07)])
def test_no_device_is_worse_than_the_others(device: str, most: float, found: dict[str, float]) -> None:
    mean, bias, _ = summary(found[run.name] for run in RUNS if run.machine.devices.name == device)
    assert mean <= most
    assert 0.96 <= bias <= 1.04


def test_other_lengths_and_sizes_are_estimated_as_well() -> None:
    """119 runs of FSDP, from 125M parameters to 70B and from 512 tokens to 65,536: of none of these regimes is the
    estimate off by itself."""
    runs = foundry()
    found = ratios(runs)
    mean, bias, worst = summary(found.values())
    assert len(found) == 119
    assert mean <= 0.055
    assert 0.98 <= bias <= 1.02
    assert abs(worst) <= 0.25
    lengths = {length: [run for run in runs if run.config.model.seq_length == length] for length in (512, 2048, 8192)}
    long = [run for run in runs if run.config.model.seq_length >= 32768]
    small = [run for run in runs if run.config.model.hidden_size <= 1024]
    for own in (*lengths.values(), long, small):
        mean, bias, _ = summary(found[run.name] for run in own)
        assert mean <= 0.07
        assert 0.94 <= bias <= 1.06
