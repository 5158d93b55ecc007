"""The simulated pipeline against the formulas and the recorded measurement."""

import itertools
import json
from pathlib import Path

import pytest

from megatron_ext.plan.schedule import few_microbatches, most_held, most_held_of_stage, order
from megatron_ext.plan.simulate import by_formula, finish, shortest, simulate
from megatron_ext.plan.simulated_timeline import ends

ROOT = Path(__file__).parents[3]


def alike(stages: int, chunks: int, forward: float = 1.0) -> tuple[list[list[float]], list[list[float]]]:
    """Stages whose forward pass takes `forward` in all, and whose backward pass twice that."""
    return [[forward / chunks] * chunks] * stages, [[2 * forward / chunks] * chunks] * stages


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), *itertools.product((2, 4, 7), (1, 2, 5))])
@pytest.mark.parametrize("groups", [1, 2, 3, 9])
def test_the_bubble_is_that_of_the_formula(stages: int, chunks: int, groups: int) -> None:
    microbatches = stages * groups
    times = simulate(*alike(stages, chunks), microbatches, stages)
    assert times.busiest == pytest.approx(3 * microbatches)
    assert times.bubble == pytest.approx((stages - 1) / (chunks * microbatches), abs=1e-12)
    assert times.bubble_share == pytest.approx((stages - 1) / (chunks * microbatches + stages - 1), abs=1e-12)
    assert by_formula(*alike(stages, chunks), microbatches).total == pytest.approx(times.total)


@pytest.mark.parametrize(
    ("stages", "chunks", "group", "microbatches"), [(4, 1, 4, 203), (4, 2, 4, 200), (3, 2, 5, 133), (2, 4, 2, 90)]
)
def test_a_long_step_is_its_beginning_repeated(stages: int, chunks: int, group: int, microbatches: int) -> None:
    """Stages that differ, and sends that take time: extrapolated from a few groups, and simulated whole."""
    forward = [[1.0 + 0.3 * ((3 * stage + chunk) % 4) for chunk in range(chunks)] for stage in range(stages)]
    backward = [[2.1 * seconds for seconds in chunk] for chunk in forward]
    assert few_microbatches(stages, chunks, microbatches, group) < microbatches
    for delay in (0.0, 0.25):
        whole = finish(forward, backward, microbatches, group, delay)
        assert simulate(forward, backward, microbatches, group, delay).total == pytest.approx(whole, rel=1e-9)
        assert whole == max(ends(forward, backward, microbatches, group, delay).values())
    assert finish(forward, backward, microbatches, group, 0.0) < whole


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (4, 2), (3, 4)])
@pytest.mark.parametrize("groups", [1, 2, 9])
def test_no_step_is_shorter_than_the_shortest(stages: int, chunks: int, groups: int) -> None:
    """Stages that are alike take exactly as long; those that differ, and sends that take time, no less."""
    microbatches = groups * stages
    even = alike(stages, chunks)
    assert shortest(*even, microbatches).total == pytest.approx(simulate(*even, microbatches, stages).total)
    forward = [[1.0 + 0.3 * ((3 * stage + chunk) % 4) for chunk in range(chunks)] for stage in range(stages)]
    backward = [[2.1 * seconds for seconds in chunk] for chunk in forward]
    whole = finish(forward, backward, microbatches, stages, 0.25)
    least = shortest(forward, backward, microbatches, 0.25)
    assert 0.8 * whole < least.total <= whole * (1 + 1e-12)
    assert least.busiest == simulate(forward, backward, microbatches, stages, 0.25).busiest


@pytest.mark.parametrize(("stages", "chunks", "group", "microbatches"), [(4, 1, 4, 16), (4, 3, 4, 24), (3, 2, 5, 17)])
def test_the_moment_of_most_is_found_without_a_look_at_all_of_a_step(
    stages: int, chunks: int, group: int, microbatches: int
) -> None:
    """Chunks that are alike, as those of most stages, and such that the last holds more, as that with the loss does."""
    for stage in range(stages):
        works = order(stage, stages, chunks, microbatches, group)
        for more in (0.0, 0.5):
            held, for_a_while = (*[1.0] * (chunks - 1), 1.0 + more), (*[2.0] * (chunks - 1), 2.0 + more)
            found = most_held_of_stage(stage, stages, microbatches, group, held, for_a_while)
            assert found == most_held(works, held, for_a_while)


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(4, 8, 1), (4, 2, 1), (4, 8, 2), (2, 4, 2), (4, 16, 3)])
def test_in_flight_is_that_of_the_formula(stages: int, microbatches: int, chunks: int) -> None:
    for stage in range(stages):
        works = order(stage, stages, chunks, microbatches, stages)
        most, _, flight = most_held(works, [1.0 / chunks] * chunks, [0.0] * chunks)
        ahead = stages - stage if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
        assert most == pytest.approx(min(ahead, chunks * microbatches) / chunks)
        assert sum(flight) == min(ahead, chunks * microbatches)
        assert len(works) == 2 * chunks * microbatches == len(set(works))


def test_the_measured_orders() -> None:
    """benchmarks/pipeline_schedules.py: megatron-core's schedules on four processes that sleep for their work."""
    for path in sorted((ROOT / "benchmarks/results").glob("pipeline_schedules-*.json")):
        measured = json.loads(path.read_text())
        stages, microbatches = measured["stages"], measured["microbatches"]
        for found in measured["orders"]:
            if found["order"] not in ("1F1B", "interleaved"):
                continue
            chunks = measured["chunks"] if found["order"] == "interleaved" else 1
            times = simulate(*alike(stages, chunks), microbatches, stages)
            # A busy machine adds some milliseconds to each of a hundred sleeps, and takes none away.
            assert 0.0 <= found["bubble"] - times.bubble < 0.05
            live = [
                most_held(
                    order(stage, stages, chunks, microbatches, stages), [1 / chunks] * chunks, [0.0] * chunks
                ).bytes
                for stage in range(stages)
            ]
            assert live == pytest.approx(found["most_live"])
