"""Describes who works when in one step of a pipeline, simulated (`preview`) or measured (`telemetry/schedule_record`).

A step has three parts: the pipeline fills until every stage has begun, is steady while all have work to do, and drains
once the first stage is done.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Pass(NamedTuple):
    """One pass of one microbatch through one chunk of a stage, in seconds since the step began."""

    forward: bool
    chunk: int
    microbatch: int
    begin: float
    end: float


class Block(NamedTuple):
    """Something else that takes time on a stage, in seconds since the step began."""

    name: str
    begin: float
    end: float


COMMUNICATION = "communication"
"""Name of a block in which the computation waits for a collective."""

MESSAGES = "messages"
"""Name of a block in which a stage waits for another stage's message."""


@dataclass(frozen=True)
class Lane:
    """What one stage does."""

    name: str
    passes: tuple[Pass, ...]
    """The passes in the order in which the stage runs them."""

    blocks: tuple[Block, ...] = ()
    """Exposed communication, which may lie inside of passes, and what follows the last pass."""

    memory: tuple[tuple[float, float], ...] = ()
    """(second, bytes from then on), in the order of time; empty where it is not known."""

    @property
    def worked(self) -> float:
        """Seconds in passes, with what they communicate."""
        return sum(each.end - each.begin for each in self.passes)

    @property
    def communicated(self) -> float:
        """Seconds of exposed collectives."""
        return sum(block.end - block.begin for block in self.blocks if block.name == COMMUNICATION)

    @property
    def peak(self) -> tuple[float, float] | None:
        """(second, bytes) when the stage first needs most; None where the memory is not known."""
        return max(self.memory, key=lambda moment: (moment[1], -moment[0]), default=None)

    def seconds(self, *, forward: bool) -> float:
        """Return the time of all passes of one kind of the median microbatch, in seconds."""
        sums: dict[int, float] = {}
        for each in self.passes:
            if each.forward == forward:
                sums[each.microbatch] = sums.get(each.microbatch, 0.0) + each.end - each.begin
        return statistics.median(sums.values()) if sums else 0.0


@dataclass(frozen=True)
class Timeline:
    """One step of a pipeline."""

    title: str
    lanes: tuple[Lane, ...]
    chunks: int
    total: float
    """Seconds from the beginning of the step to its end."""

    unit: str = "s"
    """Unit of time: "s", or "" for the time of one forward pass."""

    notes: tuple[str, ...] = ()
    """What the picture does not show, in whole sentences."""

    @property
    def fill(self) -> float:
        """Second at which every stage has begun."""
        return max((lane.passes[0].begin for lane in self.lanes if lane.passes), default=0.0)

    @property
    def drain(self) -> float:
        """Second at which the first stage is done, not before the pipeline is full."""
        done = min((lane.passes[-1].end for lane in self.lanes if lane.passes), default=0.0)
        return max(done, self.fill)

    @property
    def passes_end(self) -> float:
        """Second at which the last pass ends."""
        return max((lane.passes[-1].end for lane in self.lanes if lane.passes), default=0.0)

    @property
    def most_memory(self) -> float:
        """Bytes of the stage that needs most."""
        return max((lane.peak[1] for lane in self.lanes if lane.peak is not None), default=0.0)


def summary(timeline: Timeline) -> list[str]:
    """Return a table of the stages: how long they work and wait, and their memory."""
    rows = [["", "forward", "backward", "works", "waits", "communicates", "memory"]]
    whole = timeline.passes_end or 1.0
    for lane in timeline.lanes:
        forward, backward = lane.seconds(forward=True), lane.seconds(forward=False)
        rows.append(
            [
                lane.name,
                duration(forward, timeline.unit),
                duration(backward, timeline.unit),
                f"{lane.worked / whole:.1%}",
                f"{1 - lane.worked / whole:.1%}",
                f"{lane.communicated / whole:.1%}",
                "" if lane.peak is None else f"{size(lane.peak[1])} at {duration(lane.peak[0], timeline.unit)}",
            ]
        )
    if not any(lane.memory for lane in timeline.lanes):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def slow_stages(lanes: Sequence[Lane], factor: float = 1.15) -> list[str]:
    """Return a sentence for each stage whose passes take longer than the other stages' median, by this factor or
    more."""
    found = []
    for lane in lanes:
        others = [other.seconds(forward=True) + other.seconds(forward=False) for other in lanes if other is not lane]
        own = lane.seconds(forward=True) + lane.seconds(forward=False)
        usual = statistics.median(others) if others else 0.0
        if usual and own >= factor * usual:
            found.append(
                f"{lane.name} is slow: a microbatch takes {duration(own)} there, {own / usual:.2f} times the "
                f"{duration(usual)} of the other stages."
            )
    return found


def duration(seconds: float, unit: str = "s") -> str:
    """Return a time with three digits: "1.23 s", "12.3 ms" or "45 us"; without a unit, the number."""
    if not unit:
        return f"{seconds:.3g}"
    for factor, name in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {name}" if seconds * factor < 1000 else f"{seconds * factor:,.0f} {name}"
    return f"{seconds * 1e6:.3g} us"


def size(held: float) -> str:
    """Return bytes in GB or MB, with three digits."""
    return f"{held / 1e9:.3g} GB" if held >= 1e9 else f"{held / 1e6:.3g} MB"
