"""Tables that are searched for: right, within their memory, and as good as those that are known."""

from dataclasses import replace
from functools import cache, partial

import pytest

from megatron_ext.config.derived.pipeline_table import flaws
from megatron_ext.plan import schedule_search
from megatron_ext.plan.schedule_search import Pipeline, step_time
from megatron_ext.plan.schedule_table import named
from megatron_ext.plan.simulated_timeline import table_timeline

best = partial(schedule_search.best, seconds=0.25)
"""Within a thirtieth of the time that a search has: what it finds in more is never worse."""


def equal(ranks: int, microbatches: int, limit: float = float("inf"), chunks: int = 2) -> Pipeline:
    each = [1.0 / chunks] * (ranks * chunks)
    return Pipeline(ranks, chunks, microbatches, each, each, each, limit=limit, v_shaped=chunks == 2)


@cache
def without_limit(chunks: int) -> schedule_search.Found:
    return best(equal(4, 8, chunks=chunks))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_with_the_memory_of_1f1b_the_bubble_is_at_most_zbvs(ranks: int, groups: int) -> None:
    """Whose memory is that of 1F1B too (Qi et al. 2023, arXiv:2401.10241, section 6)."""
    microbatches = ranks * groups
    found = best(equal(ranks, microbatches, limit=ranks))
    assert list(flaws(found.rows, ranks, 2, microbatches, v_shaped=True)) == []
    assert found.bubble <= named("zbv", ranks, 2, microbatches).bubble / microbatches + 1e-9
    assert found.held <= ranks


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("ranks", [4, 8])
def test_with_half_of_that_memory_the_bubble_is_at_most_half_of_1f1bs(ranks: int, groups: int) -> None:
    """As V-Half's (Qi et al. 2024, arXiv:2405.15362, table 1), whose memory is one microbatch above the half."""
    microbatches = ranks * groups
    found = best(equal(ranks, microbatches, limit=ranks / 2 + 1), seconds=1.0)  # of 8 ranks it takes a fifth of that
    assert list(flaws(found.rows, ranks, 2, microbatches, v_shaped=True)) == []
    assert found.bubble <= 0.5 * (ranks - 1) / microbatches
    assert found.held <= ranks / 2 + 1


@pytest.mark.parametrize("limit", [1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_less_memory_is_kept_and_costs_time(limit: float, chunks: int) -> None:
    found, free = best(equal(4, 8, limit, chunks)), without_limit(chunks)
    assert list(flaws(found.rows, 4, chunks, 8, v_shaped=chunks == 2)) == []
    assert found.held <= limit
    assert found.total >= free.total


@pytest.mark.parametrize("slow", [0.5, 1.5])
@pytest.mark.parametrize("weights", [0.15, 0.5, 0.9])
@pytest.mark.parametrize("send", [0.0, 0.1])
def test_of_unequal_times_no_known_order_is_better(slow: float, weights: float, send: float) -> None:
    each = [slow, *[0.5] * 7]
    pipeline = Pipeline(4, 2, 16, each, each, [weights] * 8, send=send, limit=4, v_shaped=True)
    for name in ("zbv", "dualpipe-v"):
        assert best(replace(pipeline, limit=5.0)).total <= step_time(pipeline, named(name, 4, 2, 16).rows) + 1e-9
    assert best(pipeline).held <= 4.0


def test_the_time_is_that_of_the_picture() -> None:
    pipeline = Pipeline(3, 2, 6, [1, 2, 3, 1, 2, 3], [2, 2, 2, 3, 3, 3], [1, 1, 1, 2, 2, 2], send=0.5, v_shaped=True)
    found = best(pipeline)
    assert 1000.0 * table_timeline(pipeline, found.rows).total == pytest.approx(found.total)
