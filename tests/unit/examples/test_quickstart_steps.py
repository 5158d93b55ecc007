"""How many steps the quickstart takes on a machine, by what a step takes there."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


def loaded() -> ModuleType:
    file = Path(__file__).resolve().parents[3] / "examples/quickstart_steps.py"
    spec = importlib.util.spec_from_file_location("quickstart_steps", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


STEPS = loaded()


@pytest.mark.parametrize("step", [0.001, 0.05, 0.142, 0.157, 0.17])
def test_a_fast_machine_takes_all_steps(step: float) -> None:
    """0.142 and 0.157 s are those of the machines on which README's losses were printed."""
    steps, seconds, unfitted = STEPS.fitted(step, 1200)
    assert (steps, seconds) == (1200, unfitted)
    assert seconds <= 300
    assert STEPS.sentence(step, 1200).startswith(f"1,200 steps of {step:.2f} s: about ")


@pytest.mark.parametrize("step", [0.18, 0.2, 0.25, 0.33, 0.4])
def test_a_slow_machine_takes_as_many_steps_as_fit(step: float) -> None:
    """A multiple of 20, and one more of these would not fit. At 0.33 s the quickstart once took 544 s."""
    steps, seconds, unfitted = STEPS.fitted(step, 1200)
    assert 100 < steps < 1200
    assert steps % 20 == 0
    assert seconds <= 300 < seconds + 20 * step
    assert unfitted > 300


def test_the_estimate_is_that_of_runs_that_were_timed() -> None:
    """On two idle cores, without the installation: docs/LOG.md, and a processor without AVX-512."""
    assert STEPS.fitted(0.142, 1200).seconds == pytest.approx(245, rel=0.05)
    assert STEPS.fitted(0.31, 1200).unfitted == pytest.approx(544, rel=0.05)


@pytest.mark.parametrize("step", [0.6, 2.0])
def test_a_very_slow_machine_is_told_how_long_it_takes(step: float) -> None:
    steps, seconds, _ = STEPS.fitted(step, 1200)
    assert steps == 100
    assert f"training 100 steps, about {round(seconds / 60)} minutes in all" in STEPS.sentence(step, 1200)


def test_a_gpu_is_no_faster_than_what_it_does_not_compute() -> None:
    assert STEPS.fitted(0.002, 1200).seconds > 60
    assert STEPS.fitted(0.0001, 100).seconds >= 60
    assert "about a minute in all" in STEPS.sentence(0.0001, 100)
