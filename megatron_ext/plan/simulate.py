"""Simulates a pipeline: when every pass of every stage begins and ends, in the order of `schedule`.

A pass begins when its stage is free and what it needs has arrived: the activations of the stage before, or the gradient
of the stage after. Sends take `delay` and do not keep a stage from working.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.plan.schedule import Work, few_microbatches, order


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
    stages, chunks = len(forward), len(forward[0])
    works = [sum(map(sum, zip(f, b, strict=True))) for f, b in zip(forward, backward, strict=True)]
    busiest = microbatches * max(works)
    if stages == 1:
        return Times(busiest, busiest)
    few = few_microbatches(stages, chunks, microbatches, group)
    total = finish(forward, backward, few, group, delay)
    if few < microbatches:
        # In the middle of a long step each group takes as long as the one before.
        period = group if chunks > 1 else 1
        each = (total - finish(forward, backward, few - period, group, delay)) / period
        total += (microbatches - few) * each
    return Times(total, busiest)


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
) -> float:
    """Return when the last stage to finish has finished."""
    stages, chunks = len(forward), len(forward[0])
    plans = [order(stage, stages, chunks, microbatches, group) for stage in range(stages)]
    done: dict[tuple[int, Work], float] = {}
    clock, place = [0.0] * stages, [0] * stages
    waiting = set(range(stages))
    while waiting:
        moved = False
        for stage in sorted(waiting):
            while place[stage] < len(plans[stage]):
                work = plans[stage][place[stage]]
                need = _needed(stage, work, stages, chunks)
                if need is not None and need not in done:
                    break
                ready = 0.0 if need is None else done[need] + (delay if need[0] != stage else 0.0)
                seconds = (forward if work.forward else backward)[stage][work.chunk]
                clock[stage] = done[stage, work] = max(clock[stage], ready) + seconds
                place[stage] += 1
                moved = True
            if place[stage] == len(plans[stage]):
                waiting.discard(stage)
        assert moved, "a schedule that waits for itself"
    return max(clock)


def _needed(stage: int, work: Work, stages: int, chunks: int) -> tuple[int, Work] | None:
    """Return the pass, and its stage, whose result this one waits for; None for the first of all."""
    if work.forward:
        if stage > 0:
            return stage - 1, work
        return None if work.chunk == 0 else (stages - 1, work._replace(chunk=work.chunk - 1))
    if stage < stages - 1:
        return stage + 1, work
    if work.chunk < chunks - 1:
        return 0, work._replace(chunk=work.chunk + 1)
    return stage, work._replace(forward=True)
