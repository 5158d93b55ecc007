"""What the orders of a pipeline hold in memory, counted under megatron-core's own schedules (no sleep, no timing)."""

import pytest

from benchmarks.pipeline_schedules import ORDERS, measure

MOST_LIVE = {
    "naive": [1, 1],
    "GPipe": [4, 4],
    "1F1B": [2, 1],
    "interleaved": [2.5, 1.5],
}


@pytest.mark.parametrize("order", ORDERS)
def test_live_activations_are_those_of_the_formula(order: str) -> None:
    outcome = measure(order, stages=2, microbatches=4, chunks=2, forward_ms=0.0, repeats=1)
    assert outcome.most_live == MOST_LIVE[order]
    assert outcome.first_stage_live_formula == MOST_LIVE[order][0]
