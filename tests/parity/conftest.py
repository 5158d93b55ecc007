"""One experiment for the whole suite: the single processes that layouts are compared with are trained once."""

import pytest

from megatron_ext.verify.corpus import write_corpus
from megatron_ext.verify.parity import Experiment


@pytest.fixture(scope="session")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return Experiment(write_corpus(tmp_path_factory.mktemp("corpus")))
