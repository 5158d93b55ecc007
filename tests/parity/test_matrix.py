"""Every layout against one process: initial weights, first gradients by name, validation with a remainder, and
all 20 steps with --all; a plain run takes one or two.

`python tools/parity_table.py` writes the same comparison to benchmarks/results/parity.md.
"""

import dataclasses

import pytest

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.prove.cases import CASES, Case
from megatron_ext.plugins.prove.compared_models import MODELS, RECIPE
from megatron_ext.plugins.prove.parity import BF16_FACTOR, STEPS, VALIDATION_SAMPLES, Experiment, bf16_distance, compare
from tests.support.both_ways import OF_LAYOUTS, BothWays, trained_both_ways
from tests.support.parity_rows import FIRST, LAYOUTS, ONCE_IN_BF16, QUICK, RECOMPUTED
from tools.parity_table import fp32_row, row_or_failure


def _mark(is_first: bool, is_quick: bool) -> list[pytest.MarkDecorator]:
    return [] if is_first else [pytest.mark.full if is_quick else pytest.mark.slow]


FP32 = [pytest.param(name, marks=_mark(name in FIRST, name in QUICK)) for name in LAYOUTS]
BF16 = [pytest.param(name, marks=[pytest.mark.slow] * (name not in ONCE_IN_BF16)) for name in LAYOUTS]


@pytest.mark.parametrize("name", FP32)
def test_layout_agrees_with_one_process(name: str, experiment: Experiment) -> None:
    case = CASES[name]
    reference, other = experiment.reference(case.model), experiment.train(case)
    assert compare(reference, other).problems() == []
    assert other.weight_hash == reference.weight_hash


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputation_changes_no_bit(name: str, experiment: Experiment) -> None:
    case = CASES[name]
    differences = compare(experiment.reference(case.model), experiment.train(case))
    assert differences.none, differences.problems()


@pytest.mark.first("TP2 SP, untied", "DP2 distributed optimizer, overlap, untied")
@pytest.mark.parametrize("name", BF16)
def test_bf16_layout_stays_within_the_rounding_of_one_process(
    name: str, rounded_steps: Experiment, all_steps: Experiment
) -> None:
    """All steps are taken of experts, where one that is chosen otherwise counts for more than the rounding of a few."""
    case = CASES[name]
    steps = all_steps if "--num-experts" in MODELS[case.model] else rounded_steps
    reference, other = steps.reference(case.model, bf16=True), steps.train(case, bf16=True)
    assert other.weight_hash == reference.weight_hash
    assert other.flaws == ()
    distance, own = bf16_distance(steps.reference(case.model), reference, other)
    assert distance <= BF16_FACTOR * own


def test_the_reference_learns_and_the_evaluation_has_a_remainder(all_steps: Experiment) -> None:
    reference = all_steps.reference("untied")  # which the tests above have trained
    assert len(reference.losses) == STEPS
    assert reference.losses[-1] < reference.losses[0] - 0.3
    assert reference.validation_loss == pytest.approx(reference.losses[-1], abs=0.3)
    words = RECIPE.split()
    assert VALIDATION_SAMPLES % int(words[words.index("--global-batch-size") + 1])


def test_another_model_is_no_case_of_agreement(experiment: Experiment) -> None:
    case = Case("another epsilon", "tied", 1, ("--norm-epsilon", "1e-3"))
    assert compare(experiment.reference("tied"), experiment.train(case)).problems()


def test_ranks_that_fail_cost_the_table_one_row(experiment: Experiment) -> None:
    impossible = dataclasses.replace(CASES["PP2, tied"], flags=("--pipeline-model-parallel-size", "3"), world_size=3)
    cells, verdict = row_or_failure(fp32_row, impossible, experiment)
    assert (cells, verdict) == ([impossible.name, "3", "FAILED"], "FAILED")


def _both_ways(name: str) -> BothWays:
    case = CASES[name]
    return trained_both_ways(f"{OF_LAYOUTS} {MODELS[case.model]} {' '.join(case.flags)}")


# Slow: tests/distributed/test_deferred_reads.py compares a layout of every scheme.
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_numbers_that_are_read_late_change_no_bit(name: str) -> None:
    for at_once, late in run_ranks(CASES[name].world_size, _both_ways, name):
        assert late[:2] == at_once[:2]
        assert len(late.steps) == 3
