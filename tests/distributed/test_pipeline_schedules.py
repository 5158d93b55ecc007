"""The orders of a pipeline and what they hold in memory, counted under megatron-core's own schedules (no timing)."""

import pytest

from benchmarks.pipeline_schedules import ORDERS, measure, run_order
from megatron_ext.cost.schedule import Schedule
from megatron_ext.forkserver.ranks import run_ranks

MOST_LIVE = {
    "naive": [1, 1],
    "GPipe": [4, 4],
    "1F1B": [2, 1],
    "interleaved": [2.5, 1.5],
    "looped-bfs": [4, 4],
    "interleaved-zero-bubble": [2, 1.5],
    "zbv": [2, 2],
    "dualpipe-v": [2.5, 2.5],
}


@pytest.mark.parametrize("order", ORDERS)
def test_live_activations_are_those_of_the_formula(order: str) -> None:
    outcome = measure(order, stages=2, microbatches=4, chunks=2, forward_ms=0.0, repeats=1)
    assert outcome.most_live == MOST_LIVE[order]
    assert outcome.first_stage_live_formula == MOST_LIVE[order][0]


@pytest.mark.parametrize(("order", "stages", "microbatches", "chunks"), [("1F1B", 3, 5, 1), ("interleaved", 4, 8, 2)])
def test_the_planner_has_the_order_of_megatron_core(order: str, stages: int, microbatches: int, chunks: int) -> None:
    results = run_ranks(stages, run_order, order, microbatches, chunks, 0.0, 1)
    for stage, (_, _, _, worked) in enumerate(results):
        works = Schedule(stages, chunks, microbatches, stages if chunks > 1 else 1).order(stage)
        assert [(work.forward, work.chunk) for work in works] == worked
