"""The models that the benchmark of mixers compares."""

import pytest

from benchmarks.learning_runs import WIDTHS, model, parameters
from benchmarks.mixer_comparison import mixers, mlp_width

DATA = ("--mock-data", "--vocab-size", "1024", "--lr", "1e-3")


@pytest.mark.parametrize("size", WIDTHS)
def test_models_have_as_many_parameters_as_that_of_attention(size: str) -> None:
    counts = {
        mixer: parameters([*model(size, mlp_width(size, mixer, DATA)), *flags, *DATA])
        for mixer, flags in mixers(size).items()
    }
    assert counts == pytest.approx(dict.fromkeys(counts, counts["attention"]), rel=0.02)
