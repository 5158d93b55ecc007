"""Simulates a pipeline: when every pass of every stage begins and ends, in the order of `schedule`.

A pass begins when its stage is free and what it needs has arrived: the activations of the stage before, or the gradient
of the stage after. Sends take `delay` and do not keep a stage from working.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.plan.schedule import Work, few_microbatches, order, waits_for


@dataclass(frozen=True)
class Times:
    """The seconds of a step."""

    total: float
    busiest: float
    """Seconds that the stage works which works longest."""

    @property
    def bubble(self) -> float:
        """Time that the busiest stage waits, over the time that it works: (p-1)/(v m) where stages are equal."""
        return self.total / self.busiest - 1.0 if self.busiest else 0.0

    @property
    def bubble_share(self) -> float:
        """Time that the busiest stage waits, over the whole time."""
        return 1.0 - self.busiest / self.total if self.total else 0.0


def simulate(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    microbatches: int,
    group: int,
    delay: float = 0.0,
) -> Times:
    """Simulate a step.

    Args:
        forward, backward: seconds of one microbatch by stage and chunk.
        group: microbatches that one chunk takes before the next one's turn.
        delay: seconds of one send.
    """
    return with_and_without(forward, backward, microbatches, group, delay)[0]


def with_and_without(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    microbatches: int,
    group: int,
    delay: float,
) -> tuple[Times, Times]:
    """Simulate a step whose sends take `delay` seconds, and the same one with sends that take none."""
    stages, chunks = len(forward), len(forward[0])
    works = [sum(map(sum, zip(f, b, strict=True))) for f, b in zip(forward, backward, strict=True)]
    busiest = microbatches * max(works)
    if stages == 1:
        return Times(busiest, busiest), Times(busiest, busiest)
    few = few_microbatches(stages, chunks, microbatches, group)
    totals = finish(forward, backward, few, group, delay)
    if few < microbatches:
        # In the middle of a long step each group takes as long as the one before.
        period = group if chunks > 1 else 1
        before = finish(forward, backward, few - period, group, delay)
        ahead, at_once = (
            total + (microbatches - few) * ((total - earlier) / period)
            for total, earlier in zip(totals, before, strict=True)
        )
        totals = ahead, at_once
    return Times(totals[0], busiest), Times(totals[1], busiest)


def by_formula(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    microbatches: int,
    group: int,
    delay: float = 0.0,
) -> Times:
    """Return the same for stages that are alike, by the formula: filling and emptying take (p-1)/v microbatches'
    time."""
    stages, chunks = len(forward), len(forward[0])
    each = max(sum(map(sum, zip(f, b, strict=True))) for f, b in zip(forward, backward, strict=True))
    waits = (stages - 1) / chunks * each + 2 * (stages - 1) * delay
    return Times(microbatches * each + waits, microbatches * each)


def finish(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    microbatches: int,
    group: int,
    delay: float,
) -> tuple[float, float]:
    """Return when the last stage to finish has finished, and when it would with sends that take no time.

    Which pass waits for which does not depend on times, so that one walk computes both.
    """
    stages, chunks = len(forward), len(forward[0])
    plans = [_plan(stage, stages, chunks, microbatches, group) for stage in range(stages)]
    seconds = [[*backward[stage], *forward[stage]] for stage in range(stages)]
    done = [-1.0] * (2 * chunks * microbatches * stages)
    done_at_once = list(done)
    clock, clock_at_once, place = [0.0] * stages, [0.0] * stages, [0] * stages
    waiting: dict[int, int] = {}
    ready = list(range(stages))
    while ready:
        stage = ready.pop()
        plan, times, now, at_once = plans[stage], seconds[stage], clock[stage], clock_at_once[stage]
        at = place[stage]
        while at < len(plan):
            work, need, other, kind = plan[at]
            if need >= 0:
                arrived = done[need]
                if arrived < 0.0:
                    waiting[need] = stage
                    break
                if other:
                    arrived += delay
                now = arrived if arrived > now else now
                arrived = done_at_once[need]
                at_once = arrived if arrived > at_once else at_once
            now += times[kind]
            at_once += times[kind]
            done[work] = now
            done_at_once[work] = at_once
            if work in waiting:
                ready.append(waiting.pop(work))
            at += 1
        clock[stage], clock_at_once[stage], place[stage] = now, at_once, at
    assert not waiting, "a schedule that waits for itself"
    return max(clock), max(clock_at_once)


@functools.lru_cache(maxsize=1024)
def _plan(
    stage: int, stages: int, chunks: int, microbatches: int, group: int
) -> tuple[tuple[int, int, bool, int], ...]:
    """Return what a stage does, in this order: a number of the pass, the number of the one that it needs (-1: none),
    whether that is another stage's, and which of the stage's times it takes."""

    def number(where: int, work: Work) -> int:
        return ((work.forward * chunks + work.chunk) * microbatches + work.microbatch) * stages + where

    rows = []
    for work in order(stage, stages, chunks, microbatches, group):
        need = waits_for(stage, work, stages, chunks)
        needed, other = (-1, False) if need is None else (number(*need), need[0] != stage)
        rows.append((number(stage, work), needed, other, work.forward * chunks + work.chunk))
    return tuple(rows)
