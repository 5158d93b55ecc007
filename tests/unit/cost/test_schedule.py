"""The simulated pipeline against the formulas and the recorded measurement."""

import itertools
import json
from pathlib import Path

import pytest

from megatron_ext.cost.schedule import Schedule, Work, most_held, most_held_of_stage, named
from megatron_ext.plugins.planner.simulate import by_formula, shortest, simulate
from megatron_ext.plugins.planner.simulated_timeline import equal_stages

ROOT = Path(__file__).parents[3]


def pipeline(stages: int, chunks: int, microbatches: int, group: int | None = None) -> Schedule:
    """Where nothing else is said, as many microbatches pass in turn as there are stages."""
    return Schedule(stages, chunks, microbatches, (group or stages) if chunks > 1 else 1)


def waits_for(schedule: Schedule, stage: int, work: Work) -> tuple[int, Work] | None:
    """The pass, and its stage, whose result this one waits for; None for the first of all."""
    if work.forward:
        if stage > 0:
            return stage - 1, work
        return None if work.chunk == 0 else (schedule.stages - 1, work._replace(chunk=work.chunk - 1))
    if stage < schedule.stages - 1:
        return stage + 1, work
    if work.chunk < schedule.chunks - 1:
        return 0, work._replace(chunk=work.chunk + 1)
    return stage, work._replace(forward=True)


def plainly(
    schedule: Schedule, forward: list[list[float]], backward: list[list[float]], delay: float
) -> dict[tuple[int, Work], float]:
    """When each pass ends, found by trying every stage's next pass again and again."""
    left = [list(reversed(schedule.order(stage))) for stage in range(schedule.stages)]
    done: dict[tuple[int, Work], float] = {}
    clock = [0.0] * schedule.stages
    while any(left):
        before = len(done)
        for stage in range(schedule.stages):
            while left[stage]:
                work = left[stage][-1]
                need = waits_for(schedule, stage, work)
                if need is not None and need not in done:
                    break
                arrived = 0.0 if need is None else done[need] + (delay if need[0] != stage else 0.0)
                seconds = (forward if work.forward else backward)[stage][work.chunk]
                clock[stage] = done[stage, left[stage].pop()] = max(clock[stage], arrived) + seconds
        assert len(done) > before, "a schedule that waits for itself"
    return done


def alike(stages: int, chunks: int, forward: float = 1.0) -> tuple[list[list[float]], list[list[float]]]:
    """Stages whose forward pass takes `forward` in all, and whose backward pass twice that."""
    return [[forward / chunks] * chunks] * stages, [[2 * forward / chunks] * chunks] * stages


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), *itertools.product((2, 4, 7), (1, 2, 5))])
@pytest.mark.parametrize("groups", [1, 2, 3, 9])
def test_the_bubble_is_that_of_the_formula(stages: int, chunks: int, groups: int) -> None:
    microbatches = stages * groups
    schedule = pipeline(stages, chunks, microbatches)
    times = simulate(schedule, *alike(stages, chunks))
    assert times.busiest == pytest.approx(3 * microbatches)
    assert times.bubble == pytest.approx((stages - 1) / (chunks * microbatches), abs=1e-12)
    assert times.bubble_share == pytest.approx((stages - 1) / (chunks * microbatches + stages - 1), abs=1e-12)
    assert by_formula(schedule, *alike(stages, chunks)).total == pytest.approx(times.total)


@pytest.mark.parametrize(
    ("stages", "chunks", "group", "microbatches"), [(4, 1, 4, 203), (4, 2, 4, 200), (3, 2, 5, 133), (2, 4, 2, 90)]
)
def test_a_long_step_is_its_beginning_repeated(stages: int, chunks: int, group: int, microbatches: int) -> None:
    """Stages that differ, and sends that take time: extrapolated from a few groups, and simulated whole."""
    forward = [[1.0 + 0.3 * ((3 * stage + chunk) % 4) for chunk in range(chunks)] for stage in range(stages)]
    backward = [[2.1 * seconds for seconds in chunk] for chunk in forward]
    schedule = pipeline(stages, chunks, microbatches, group)
    assert schedule.few().microbatches < microbatches
    for delay in (0.0, 0.25):
        found = schedule.ends(forward, backward, delay)
        assert simulate(schedule, forward, backward, delay).total == pytest.approx(max(found.values()), rel=1e-9)
        assert found == plainly(schedule, forward, backward, delay)
        for stage in range(stages):
            assert tuple(work for where, work in found if where == stage) == schedule.order(stage)
    assert max(schedule.ends(forward, backward).values()) < max(found.values())


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (4, 1), (4, 2), (3, 4)])
@pytest.mark.parametrize("groups", [1, 2, 9])
def test_no_step_is_shorter_than_the_shortest(stages: int, chunks: int, groups: int) -> None:
    """Stages that are alike take exactly as long; those that differ, and sends that take time, no less."""
    microbatches = groups * stages
    schedule, even = pipeline(stages, chunks, microbatches), alike(stages, chunks)
    assert shortest(schedule, *even).total == pytest.approx(simulate(schedule, *even).total)
    forward = [[1.0 + 0.3 * ((3 * stage + chunk) % 4) for chunk in range(chunks)] for stage in range(stages)]
    backward = [[2.1 * seconds for seconds in chunk] for chunk in forward]
    whole = max(schedule.ends(forward, backward, 0.25).values())
    least = shortest(schedule, forward, backward, 0.25)
    assert 0.8 * whole < least.total <= whole * (1 + 1e-12)
    assert least.busiest == simulate(schedule, forward, backward, 0.25).busiest


@pytest.mark.parametrize(("stages", "chunks", "group", "microbatches"), [(4, 1, 4, 16), (4, 3, 4, 24), (3, 2, 5, 17)])
def test_the_moment_of_most_is_found_without_a_look_at_all_of_a_step(
    stages: int, chunks: int, group: int, microbatches: int
) -> None:
    """Chunks that are alike, as those of most stages, and such that the last holds more, as that with the loss does."""
    schedule = pipeline(stages, chunks, microbatches, group)
    for stage in range(stages):
        works = schedule.order(stage)
        for more in (0.0, 0.5):
            held, for_a_while = (*[1.0] * (chunks - 1), 1.0 + more), (*[2.0] * (chunks - 1), 2.0 + more)
            found = most_held_of_stage(schedule, stage, held, for_a_while)
            assert found == most_held(works, held, for_a_while)


@pytest.mark.parametrize(("stages", "microbatches", "chunks"), [(4, 8, 1), (4, 2, 1), (4, 8, 2), (2, 4, 2), (4, 16, 3)])
def test_in_flight_is_that_of_the_formula(stages: int, microbatches: int, chunks: int) -> None:
    for stage in range(stages):
        works = pipeline(stages, chunks, microbatches).order(stage)
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
            schedule = pipeline(stages, chunks, microbatches)
            times = simulate(schedule, *alike(stages, chunks))
            # A busy machine adds some milliseconds to each of a hundred sleeps, and takes none away.
            assert 0.0 <= found["bubble"] - times.bubble < 0.05
            live = [
                most_held(schedule.order(stage), [1 / chunks] * chunks, [0.0] * chunks).bytes for stage in range(stages)
            ]
            assert live == pytest.approx(found["most_live"])


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (4, 1), (2, 3), (4, 2)])
def test_a_chunk_sends_its_output_on_and_its_gradient_back(stages: int, chunks: int) -> None:
    """All but the model's last chunk, and all but its first."""
    schedule = pipeline(stages, chunks, 2 * stages)
    ends_of_the_model = [(stage == 0) + (stage == stages - 1) for stage in range(stages)]
    expected = [2 * chunks - ends if stages > 1 else 0 for ends in ends_of_the_model]
    assert [schedule.messages(stage) for stage in range(stages)] == expected


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("groups", [2, 4])
def test_bubbles_are_those_of_the_papers(stages: int, groups: int) -> None:
    """In units of a microbatch, whose F, I and W take a third each: (p-1)/v without a split (Huang et al. 2019;
    Lamy-Poirier 2022, arXiv:2211.05953), a third of that for ZB-H1 (Qi et al. 2023, arXiv:2401.10241, section 2.3)."""
    microbatches = stages * groups
    assert named("gpipe", stages, 1, microbatches).bubble == pytest.approx(stages - 1)
    assert named("looped-bfs", stages, 2, microbatches).bubble == pytest.approx((stages - 1) / 2)
    assert named("interleaved-zero-bubble", stages, 1, microbatches).bubble == pytest.approx((stages - 1) / 3)
    for name in ("interleaved-zero-bubble", "zbv", "dualpipe-v"):
        assert named(name, stages, 2, microbatches).bubble <= (stages - 1) / 6 + 1e-9


@pytest.mark.parametrize("name", ["zbv", "dualpipe-v"])
def test_a_v_holds_as_much_on_every_rank_as_1f1b_on_the_first(name: str) -> None:
    table = named(name, 4, 2, 16)
    held = [most_held(table.order(rank), [0.5, 0.5], [0.0, 0.0]).bytes for rank in range(4)]
    assert max(held) <= 4.5
    assert max(held) - min(held) <= 0.5


def test_stages_that_differ_are_simulated_pass_by_pass() -> None:
    """One microbatch by hand: 0F to 1, 1F from 1.5 to 3.5, 2F to 6.5, 3F from 7 to 11, 3I to 15; 2I from 15.5 to 18.5,
    2W to 21.5, 1I to 23.5; 0I from 24 to 25, 0W to 26."""
    forward, backward = [[1.0, 4.0], [2.0, 3.0]], [[2.0, 8.0], [4.0, 6.0]]
    assert simulate(named("zbv", 2, 2, 1), forward, backward, delay=0.5).total == 26.0


def test_the_picture_shows_the_halves() -> None:
    timeline = equal_stages(2, 2, 4, name="zbv")
    passes = timeline.lanes[0].passes
    assert {each.half for each in passes} == {"", "inputs", "weights"}
    assert sum(each.end - each.begin for each in passes) == pytest.approx(12.0)
    assert [each.begin for each in passes] == sorted(each.begin for each in passes)
