"""The single processes that layouts are compared with are trained once."""

import pytest

from megatron_ext.verify.parity import STEPS, Experiment, write_corpus


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def steps(pytestconfig: pytest.Config) -> int:
    """All steps of docs/parity.md with --all; a plain run takes fewer, for each waits for sums over the ranks."""
    return STEPS if pytestconfig.getoption("--all") else 3


@pytest.fixture(scope="session")
def experiment(pytestconfig: pytest.Config, all_steps: Experiment, first_steps: Experiment) -> Experiment:
    """All steps of docs/parity.md with --all; the first in a plain run."""
    return all_steps if pytestconfig.getoption("--all") else first_steps


@pytest.fixture(scope="session")
def all_steps(data: list[str]) -> Experiment:
    return Experiment(data)


@pytest.fixture(scope="session")
def rounded_steps(data: list[str], pytestconfig: pytest.Config) -> Experiment:
    """For bf16, where the largest of a few differences says little about the rounding: it is met in the first four."""
    return Experiment(data, STEPS if pytestconfig.getoption("--all") else 6)


@pytest.fixture(scope="session")
def first_steps(data: list[str]) -> Experiment:
    """Two updates. The first moves the weights, which a warmup from 0 would not: the second step's loss sees it, and
    the evaluation sees both."""
    return Experiment([*data, "--lr-warmup-init", "1e-4"], 2)
