"""Lion in a layout against one process: the first step as with every optimizer, and the curve as far as a sign allows.

Where momentum and gradient cancel, rounding decides which way an element steps. Layouts that round alike (data
parallelism) give one curve; tensor parallelism sums in another order. docs/decisions.md has the numbers.
"""

import pytest

from megatron_ext.plugins.prove.cases import CASES
from megatron_ext.plugins.prove.parity import (
    CURVE_TOLERANCE,
    FIRST_LOSS_TOLERANCE,
    GRADIENT_TOLERANCE,
    Experiment,
    compare,
)

LOSS_TOLERANCES = {"DP2 distributed optimizer, untied": CURVE_TOLERANCE, "TP2 SP, untied": 1e-4}
"""Nats per token, over 20 steps."""


@pytest.fixture(scope="module")
def flags(data: list[str]) -> list[str]:
    return [*data, "--optimizer", "lion", "--lr", "1e-4"]


@pytest.fixture(scope="module")
def lion(flags: list[str], steps: int) -> Experiment:
    return Experiment(flags, steps)


@pytest.mark.parametrize("name", LOSS_TOLERANCES)
def test_lion_agrees_with_one_process(name: str, lion: Experiment) -> None:
    differences = compare(lion.reference("untied"), lion.train(CASES[name]))
    assert not differences.weights
    assert not differences.flaws
    assert differences.first_loss <= FIRST_LOSS_TOLERANCE
    assert differences.gradients[differences.worst_gradient] <= GRADIENT_TOLERANCE
    assert differences.loss <= LOSS_TOLERANCES[name]


# Slow: 20 steps of the reference alone.
@pytest.mark.slow
def test_lion_learns(flags: list[str]) -> None:
    losses = Experiment(flags).reference("untied").losses
    assert losses[-1] < losses[0] - 0.1
