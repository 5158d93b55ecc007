"""Gaps, intervals and the picture of the learning benchmark; one model of each size starts."""

import math
from typing import Any

import pytest

from benchmarks.low_precision_learning import COMMON, RUNS, SHAPES, corpus, gap, page, picture
from benchmarks.recording import heading
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.parts.catalogue import count
from megatron_ext.rules.validate import problems

FOUND: Any = {
    "bf16": {"1": 2.0, "2": 2.1, "3": 2.2},
    "nvfp4": {"1": 2.02, "2": 2.13, "3": 2.21, "4": 9.0},
    "mxfp4": {"1": 2.3},
}


def test_a_gap_is_to_bf16_with_the_same_seed() -> None:
    mean, half, seeds = gap(FOUND, "nvfp4")
    assert (mean, seeds) == (pytest.approx(0.02), 3)
    assert half == pytest.approx(4.30 * 0.01 / math.sqrt(3))
    assert math.isnan(gap(FOUND, "mxfp4")[1])


def test_table_and_picture_have_every_run() -> None:
    drawn = picture({"1M dense": FOUND})
    assert [drawn.count(text) for text in ("<circle", "1M dense: nvfp4", "+0.020")] == [3, 1, 1]
    found = {**heading(), "steps": 10, "models": {"1M dense": FOUND}}
    assert "| 1M dense | nvfp4 | 3 | 3.8400 | +0.0200 ± 0.0248 |" in page(found)


@pytest.mark.parametrize(("size", "shape"), SHAPES)
def test_every_model_takes_every_format(size: str, shape: str) -> None:
    facts = Facts(vocab_size=257)
    for flags in RUNS.values():
        words = [*COMMON, *SHAPES[size, shape].split(), *flags.split(), "--train-iters", "10", "--mock-data"]
        config = resolve({**parse(words).values, "world_size": 1, "device": "cpu"}, facts)
        assert not problems(config, facts)
        assert count(config) == pytest.approx(float(size[0]) * 1e6, rel=0.25)
    assert len(corpus()) > 1_000_000
