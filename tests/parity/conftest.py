"""The single processes that layouts are compared with are trained once."""

import pytest

from megatron_ext.verify.parity import STEPS, Experiment, write_corpus


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def steps(pytestconfig: pytest.Config) -> int:
    """All steps of docs/parity.md with --all; in a plain run two updates, of which the evaluation sees the second."""
    return STEPS if pytestconfig.getoption("--all") else 2


@pytest.fixture(scope="session")
def experiment(data: list[str], steps: int) -> Experiment:
    return Experiment(data, steps)


@pytest.fixture(scope="session")
def all_steps(data: list[str]) -> Experiment:
    return Experiment(data)


@pytest.fixture(scope="session")
def rounded_steps(data: list[str], pytestconfig: pytest.Config) -> Experiment:
    """For bf16, where the largest of a few differences says little about the rounding: it is met in the first four."""
    return Experiment(data, STEPS if pytestconfig.getoption("--all") else 6)


@pytest.fixture(scope="session")
def first_steps(data: list[str]) -> Experiment:
    """For faults that the first gradients show, and weights that then part."""
    return Experiment(data, 2)
