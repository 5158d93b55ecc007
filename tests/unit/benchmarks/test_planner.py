"""The planner's times against published runs: fails when they get worse. docs/planner.md has the table."""

import statistics

import pytest

from benchmarks.planner import HELD_OUT, calibrated, components, foundry, published, ratios, sources, summary
from megatron_ext.plan.calibrate import believed
from megatron_ext.plan.hardware import ASSUMED_PROGRAMS_DIFFER, PROGRAMS_DIFFER, RUNS_DIFFER

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


def test_one_run_corrects_the_others_of_its_program(found: dict[str, float]) -> None:
    [dgxc] = [runs for source, runs in sources(RUNS).items() if "dgxc" in source]
    errors = calibrated(dgxc, found).values()
    assert len(errors) == 12
    assert statistics.fmean(errors) <= 0.03
    assert max(errors) <= 0.04


def test_how_much_of_a_run_is_believed_was_not_learned_from_its_own_program(found: dict[str, float]) -> None:
    """With the deviations of the other sources, and for runs that are in no fit."""
    [dgxc] = [runs for source, runs in sources(RUNS).items() if "dgxc" in source]
    others = [runs for source, runs in sources(RUNS).items() if "dgxc" not in source]
    assert components([*others, dgxc], found) == pytest.approx((PROGRAMS_DIFFER, RUNS_DIFFER), rel=0.2)
    assert max(calibrated(dgxc, found, components(others, found)).values()) <= 0.04
    unseen = [run for run in published(HELD_OUT) if "dgxc" in run.source]
    assert max(calibrated(dgxc, found | ratios(unseen), others=unseen).values()) <= 0.04


def test_a_machine_of_half_the_speed_is_believed_to_be_one() -> None:
    assert believed(1.0) == 1.0
    assert believed(2.0) == pytest.approx(2.0, rel=0.005)
    assert believed(0.5) == pytest.approx(0.5, rel=0.01)
    assert believed(1.04) == pytest.approx(1.04 ** (0.03**2 / (0.03**2 + 0.05**2)))
    # Of devices that no published run tells anything about, the run that was measured says nearly all.
    assert believed(1.04, ASSUMED_PROGRAMS_DIFFER) == pytest.approx(1.038, abs=1e-3)


def test_the_range_holds_nine_of_ten(found: dict[str, float]) -> None:
    inside = [run.machine.range[0] <= 1 / found[run.name] <= run.machine.range[1] for run in RUNS]
    assert sum(inside) >= 0.9 * len(inside)


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
