"""Describes who works when in one simulated step of a pipeline (`simulated_timeline.py`).

A step has three parts: the pipeline fills until every stage has begun, is steady while all have work to do, and drains
once the first stage is done.
"""

import statistics
from dataclasses import dataclass
from typing import NamedTuple


class Pass(NamedTuple):
    """One pass of one microbatch through one chunk of a stage, in seconds since the step began."""

    forward: bool
    chunk: int
    microbatch: int
    begin: float
    end: float
    half: str = ""
    """Which part of a backward pass that is split: "inputs" or "weights"."""


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
    """One stage's passes, communication and memory during the step."""

    name: str
    passes: tuple[Pass, ...]
    """The passes in the order in which the stage runs them."""

    blocks: tuple[Block, ...] = ()
    """Exposed communication, which may lie inside of passes, and what follows the last pass."""

    memory: tuple[tuple[float, float], ...] = ()
    """(second, bytes from then on), in the order of time; empty where it is not known."""

    @property
    def worked(self) -> float:
        """Seconds in passes, including their communication."""
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
    """Facts that the picture does not show, in whole sentences."""

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
    """Return a table of the stages: how long they work and wait, and their memory; under it, a line on the time that
    the shares are of."""
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
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    number = len({each.microbatch for lane in timeline.lanes for each in lane.passes})
    return [*lines, f"Shares are of the time until the last pass of the {number} microbatches drawn ends."]


def duration(seconds: float, unit: str = "s") -> str:
    """Return a time with three digits: "1.23 s", "12.3 ms" or "45 us"; without a unit, the number."""
    if not unit:
        return f"{seconds:.3g}"
    for factor, name in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {name}" if seconds * factor < 1000 else f"{seconds * factor:,.0f} {name}"
    return f"{seconds * 1e6:.3g} us"


def size(count: float) -> str:
    """Return bytes in GB or MB, with three digits."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
