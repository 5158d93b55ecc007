"""Simulates a pipeline: when every pass of every stage begins and ends, in the order of `schedule`.

A pass begins when its stage is free and its input has arrived: the activations of the stage before, or the gradient of
the stage after. Sends take `delay` and do not keep a stage from working.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ext.cost.schedule import Schedule


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
    schedule: Schedule, forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]], delay: float = 0.0
) -> Times:
    """Simulate a step.

    Args:
        forward, backward: seconds of one microbatch by stage and chunk.
        delay: seconds of one send.
    """
    least = shortest(schedule, forward, backward, delay)
    if schedule.stages == 1:
        return least
    few = schedule.few()
    total = few.total(forward, backward, delay)
    if more := schedule.microbatches - few.microbatches:
        # In the middle of a long step each group takes as long as the one before.
        before = replace(few, microbatches=few.microbatches - schedule.group).total(forward, backward, delay)
        total += more * ((total - before) / schedule.group)
    return Times(max(total, least.total), least.busiest)


def shortest(
    schedule: Schedule, forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]], delay: float = 0.0
) -> Times:
    """Return a time that no step undercuts: each stage works all of its passes; it begins when a microbatch has come
    through the first chunks of the stages before it, and what its last pass gives goes back through these."""
    works = _works(forward, backward)
    total = elsewhere = 0.0
    for stage, work in enumerate(works):
        total = max(total, schedule.microbatches * work + elsewhere)
        elsewhere += forward[stage][0] + backward[stage][0] + 2 * delay
    return Times(total, schedule.microbatches * max(works))


def by_formula(
    schedule: Schedule, forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]], delay: float = 0.0
) -> Times:
    """Return the time for stages that are alike, by the formula: filling and emptying take (p-1)/v microbatches'
    time."""
    each = max(_works(forward, backward))
    waits = schedule.bubble * each + 2 * (schedule.stages - 1) * delay
    return Times(schedule.microbatches * each + waits, schedule.microbatches * each)


def _works(forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds that each stage works for one microbatch."""
    works: list[float] = []
    for stage, (ahead, back) in enumerate(zip(forward, backward, strict=True)):
        # Stages that are alike have the same lists.
        alike = stage > 0 and ahead is forward[stage - 1] and back is backward[stage - 1]
        works.append(works[-1] if alike else sum(map(sum, zip(ahead, back, strict=True))))
    return works
