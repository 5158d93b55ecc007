"""The single processes that layouts are compared with are trained once."""

from collections.abc import Callable

import pytest

from megatron_ext.plugins.prove.cases import Case
from megatron_ext.plugins.prove.compared_models import MODELS
from megatron_ext.plugins.prove.parity import STEPS, Experiment, write_corpus
from megatron_ext.plugins.prove.recorded_training import RunRecord

OF_LAYOUTS = ("tied", "untied", "8 layers, tied", "8 layers, untied", "experts", "routing by groups")
"""Models on which layouts are compared for their own sake: with as many microbatches as docs/parity.md has."""

CANCELLED = ("delta rules, packed",)
"""Models of which a gradient all but cancels over the samples of half a batch. Over the 4 samples the gradient of A_log
in layer 0 is 1/31 of the sum of its positions' absolute values, and one process in fp32 is 1.3e-5 of its norm off fp64
(7e-6 with the whole recurrence in fp64, for what comes in is fp32); over 8 samples it is 1/4.3, and 2e-6 off."""


class FirstSteps(Experiment):
    """What a plain run takes of an experiment.

    The first update moves the weights, which a warmup from 0 would not: the second step's loss sees it, and the
    evaluation sees both. Of a part of a model that keeps nothing from one update to the next, it sees one. How often
    passes are repeated is a matter of the layout: models that are there for a part have half of the microbatches.
    """

    def __init__(self, data: list[str]):
        moved = [*data, "--lr-warmup-init", "1e-4"]
        fewer = [*moved, "--global-batch-size", "4"]
        super().__init__(moved, 2)
        self.of_layouts = Experiment(moved, 2)
        self._of_state, self._of_parts = Experiment(fewer, 2), Experiment(fewer, 1)

    def train(self, case: Case, *, bf16: bool = False, sabotage: Callable[[], None] | None = None) -> RunRecord:
        """Return the record of a case."""
        return self._of(case.model).train(case, bf16=bf16, sabotage=sabotage)

    def _reference(self, model: str, *, bf16: bool = False) -> RunRecord:
        return self._of(model).reference(model, bf16=bf16)

    def _of(self, model: str) -> Experiment:
        if model in OF_LAYOUTS or model in CANCELLED:
            return self.of_layouts
        keeps = any(flag in MODELS[model] for flag in ("--optimizer", "--qk-clip", "--num-experts"))
        return self._of_state if keeps else self._of_parts


@pytest.fixture(scope="session")
def all_data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_corpus(tmp_path_factory.mktemp("all"))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config, all_data: list[str]) -> list[str]:
    """Data whose evaluation ends with a batch that is not full: in a plain run its only one, or the second of two."""
    return all_data if pytestconfig.getoption("--all") else write_corpus(tmp_path_factory.mktemp("first"), 5)


@pytest.fixture(scope="session")
def steps(pytestconfig: pytest.Config) -> int:
    """All steps of docs/parity.md with --all; a plain run takes fewer, for each waits for sums over the ranks."""
    return STEPS if pytestconfig.getoption("--all") else 3


@pytest.fixture
def experiment(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config, all_steps: Experiment, first_steps: FirstSteps
) -> Experiment:
    """All steps of docs/parity.md with --all; the first in a plain run, and by -m slow: some need the batch."""
    if pytestconfig.getoption("--all"):
        return all_steps
    return first_steps.of_layouts if request.node.get_closest_marker("slow") else first_steps


@pytest.fixture(scope="session")
def all_steps(all_data: list[str]) -> Experiment:
    return Experiment(all_data)


@pytest.fixture(scope="session")
def rounded_steps(data: list[str], pytestconfig: pytest.Config) -> Experiment:
    """For bf16, where the largest of a few differences says little about the rounding: it is met in the first four."""
    return Experiment(data, STEPS if pytestconfig.getoption("--all") else 6)


@pytest.fixture(scope="session")
def first_steps(data: list[str]) -> FirstSteps:
    return FirstSteps(data)
