"""The order in which a pipeline stage works, as megatron-core's schedules have it, and what it holds on the way.

Without interleaving (1F1B) stage s runs p - s - 1 forward passes ahead and then one forward and one backward pass in
turn. With v chunks, microbatches pass in groups of N (by default p): a group passes chunk after chunk, and stage s runs
2 (p - s - 1) + (v - 1) N forward passes of chunks ahead (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

Puts all passes of a pipeline into an order in which each stands behind what it waits for.

A pass has a place in that order, from 2 on: 0 is the beginning of the step, 1 what need not be waited for. With the
places of what a stage does before, and of what it waits for, a simulation is one loop over the passes. The same order
serves all pipelines with as many stages, chunks and microbatches, however long their passes take.
"""

import functools
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple


class Work(NamedTuple):
    """One pass of one microbatch through one chunk of a stage."""

    forward: bool
    chunk: int
    microbatch: int
    half: str = ""
    """Which part of a backward pass that is split: "inputs" or "weights"."""


@dataclass(frozen=True)
class Schedule:
    """What every stage of a pipeline does in a step, in which order.

    The planner, `tools/draw_pipeline.py`, `--dry-run` and what --record-schedule draws ask it alone. `train/build.py`
    takes the engine's function that works in this order.
    """

    stages: int
    chunks: int
    """Number of model chunks of each stage."""

    microbatches: int
    group: int = 1
    """Microbatches that one chunk takes before the next one's turn; 1 without interleaving."""

    def order(self, stage: int) -> tuple[Work, ...]:
        """Return everything that a stage does in a step, in this order."""
        return _order(self, stage)

    def ahead(self, stage: int) -> int:
        """Return how many forward passes a stage works before its first pair of a forward and a backward pass, where
        there are as many."""
        passes = self.stages - stage - 1
        return passes if self.chunks == 1 else 2 * passes + (self.chunks - 1) * self.group

    def waits_for(self, stage: int, work: Work) -> tuple[int, Work] | None:
        """Return the pass, and its stage, whose result this one waits for; None for the first of all."""
        if work.forward:
            if stage > 0:
                return stage - 1, work
            return None if work.chunk == 0 else (self.stages - 1, work._replace(chunk=work.chunk - 1))
        if stage < self.stages - 1:
            return stage + 1, work
        if work.chunk < self.chunks - 1:
            return 0, work._replace(chunk=work.chunk + 1)
        return stage, work._replace(forward=True)

    def messages(self, stage: int) -> int:
        """Return how many messages a stage sends for one microbatch."""
        return _messages(replace(self, microbatches=1))[stage]

    def share(self, work: Work) -> float:
        """Return which share of its chunk's pass this one takes."""
        return 1.0

    @property
    def bubble(self) -> float:
        """How long a stage waits in a step, in microbatches: of stages that are alike, (p-1)/v."""
        return (self.stages - 1) / self.chunks

    @property
    def least_bubble(self) -> float:
        """The same, of stages of whatever times: it is never less."""
        return self.bubble

    def few(self) -> "Schedule":
        """Return the schedule of as many microbatches as show everything that more of them repeat: the pipeline filled,
        some groups, and emptied. It leaves the same incomplete last group."""
        enough = 4 * max(self.stages, self.group)
        if self.microbatches <= enough:
            return self
        return replace(self, microbatches=enough // self.group * self.group + self.microbatches % self.group)


@functools.lru_cache(maxsize=1024)
def _order(schedule: Schedule, stage: int) -> tuple[Work, ...]:
    forward, backward = _passes(schedule.chunks, schedule.microbatches, schedule.group)
    ahead = min(schedule.ahead(stage), len(forward))
    steady = [work for pair in zip(forward[ahead:], backward, strict=False) for work in pair]
    return (*forward[:ahead], *steady, *backward[len(forward) - ahead :])


@functools.lru_cache(maxsize=256)
def _messages(schedule: Schedule) -> Counter[int]:
    """Return how many messages each stage sends."""
    needs = [
        (stage, schedule.waits_for(stage, work)) for stage in range(schedule.stages) for work in schedule.order(stage)
    ]
    return Counter(need[0] for stage, need in needs if need is not None and need[0] != stage)


@functools.lru_cache(maxsize=256)
def _passes(chunks: int, microbatches: int, group: int) -> tuple[list[Work], list[Work]]:
    """Return the forward passes of a stage, and its backward passes, which have the chunks the other way round, each in
    order: a group of microbatches passes chunk after chunk."""
    table = [
        (chunk, microbatch)
        for start in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(start, min(start + group, microbatches))
    ]
    backward = [Work(False, chunks - 1 - chunk, microbatch) for chunk, microbatch in table]
    return [Work(True, chunk, microbatch) for chunk, microbatch in table], backward


class Most(NamedTuple):
    """The moment at which a stage holds most."""

    bytes: float
    chunk: int
    """The chunk whose pass runs."""

    flight: list[int]
    """Number of microbatches of each chunk between their forward and their backward pass."""


@functools.lru_cache(maxsize=4096)
def most_held_of_stage(schedule: Schedule, stage: int, held: tuple[float, ...], for_a_while: tuple[float, ...]) -> Most:
    """Return `most_held` of what a stage does in a step, without a look at all of it: chunks that are alike hold most
    in the first pass behind those ahead, and others before whole groups repeat what they hold."""
    works, first = schedule.order(stage), schedule.ahead(stage)
    if type(schedule) is not Schedule:
        return most_held(works, held, for_a_while)
    if len(set(held)) == len(set(for_a_while)) == 1 and held[0] > 0.0:
        begun = [work.chunk for work in works[: first + 1] if work.forward]
        flight = [begun.count(chunk) for chunk in range(schedule.chunks)]
        return Most(len(begun) * held[0] + for_a_while[0], begun[-1], flight)
    whole = schedule.microbatches % schedule.group == 0
    return most_held(works[: first + 2 * schedule.chunks * schedule.group + 2] if whole else works, held, for_a_while)


def most_held(works: Sequence[Work], held: Sequence[float], for_a_while: Sequence[float]) -> Most:
    """Return the most that a stage holds at any time.

    Args:
        held: bytes of one microbatch in each chunk, between its forward and its backward pass.
        for_a_while: further bytes while a chunk's pass runs.
    """
    now, most, place = 0.0, -1.0, 0
    for at, (forward, chunk, _, half) in enumerate(works):
        if forward:
            now += held[chunk]
        if now + for_a_while[chunk] > most:
            most, place = now + for_a_while[chunk], at
        if not forward and half != "inputs":
            now -= held[chunk]
    flight = [0] * len(held)
    for forward, chunk, _, half in works[:place]:
        flight[chunk] += 1 if forward else -(half != "inputs")
    last = works[place]
    flight[last.chunk] += last.forward
    return Most(most, last.chunk, flight)


_BEGINNING, _NOTHING = 0, 1


def _numbers() -> "array[int]":
    return array("I")


@dataclass
class _Part:
    """Some passes, in order."""

    before: "array[int]" = field(default_factory=_numbers)
    """Places of the passes that the same stage works before."""

    needs: "array[int]" = field(default_factory=_numbers)
    """Places of the passes of other stages whose results are sent to this one."""

    kinds: "array[int]" = field(default_factory=_numbers)
    """Which of all stages' times each pass takes."""

    def run(self, done: list[float], seconds: Sequence[float], delay: float) -> None:
        """Append to `done` when each pass ends."""
        append = done.append
        for before, need, kind in zip(self.before, self.needs, self.kinds, strict=True):
            free, arrived = done[before], done[need] + delay
            append((arrived if arrived > free else free) + seconds[kind])


@dataclass
class _State:
    """How far the stages have come."""

    added: list[int]
    """Passes of each stage that have a place."""

    last: list[int]
    """Place of the last of them."""

    place: list[int]
    """Place of each pass of each stage; the beginning where it has none yet."""

    free: int = 2
    """Place of the next one."""

    def copy(self) -> "_State":
        return _State(self.added.copy(), self.last.copy(), self.place.copy(), self.free)


class _Walk:
    """The passes of a step, and of another one that is shorter; those that come out the same in both are there once."""

    def __init__(self, schedule: Schedule, shorter_by: int):
        self.schedule, self.chunks, self.width = schedule, schedule.chunks, schedule.microbatches
        self.common, self.whole, self.shorter = _Part(), _Part(), _Part()
        self.size, stages = 2 * self.chunks * self.width, schedule.stages
        """Passes of a stage."""
        self._needed = [self._needs(stage) for stage in range(stages)]
        # Behind all of them, as the last of the list, what need not be waited for.
        state = _State([0] * stages, [_BEGINNING] * stages, [_BEGINNING] * (self.size * stages) + [_NOTHING])
        whole, self.last_of_shorter = self._works(schedule), []
        if shorter_by:
            fewer = self._works(replace(schedule, microbatches=self.width - shorter_by))
            self._add(self.common, [_alike(*both) for both in zip(whole, fewer, strict=True)], state)
            other = state.copy()
            self._add(self.shorter, fewer, other)
            self.last_of_shorter = other.last
        self._add(self.whole, whole, state)
        self.last, self.place, self.works = state.last, state.place, whole

    def ends(self, seconds: Sequence[float], delay: float) -> tuple[float, float]:
        """Return when the step ends, and when the shorter one does (0 where there is none).

        Args:
            seconds: of each stage's backward passes, by chunk, and then of its forward passes, stage by stage.
            delay: seconds of one send.
        """
        done = [0.0, -math.inf]
        self.common.run(done, seconds, delay)
        other = done.copy()
        self.whole.run(done, seconds, delay)
        self.shorter.run(other, seconds, delay)
        return max(done[at] for at in self.last), max((other[at] for at in self.last_of_shorter), default=0.0)

    def each(self, seconds: Sequence[float], delay: float) -> dict[tuple[int, Work], float]:
        """Return when each pass ends, by stage and pass, where there is no shorter step."""
        done = [0.0, -math.inf]
        self.whole.run(done, seconds, delay)
        return {
            (stage, work): done[self.place[stage * self.size + number]]
            for stage, works in enumerate(self.works)
            for work, number in zip(self.schedule.order(stage), works, strict=True)
        }

    def _works(self, schedule: Schedule) -> list[list[int]]:
        """Return what each stage does, as numbers: backward passes are before forward passes, then chunk by chunk."""
        chunks, width = self.chunks, self.width
        return [
            [
                (chunk + chunks if forward else chunk) * width + number
                for forward, chunk, number, _ in schedule.order(stage)
            ]
            for stage in range(schedule.stages)
        ]

    def _add(self, part: _Part, works: list[list[int]], state: _State) -> None:
        """Give a place to every pass, up to those that wait for one which is not among them."""
        place, free = state.place, state.free
        before_all: list[int] = []
        needs: list[int] = []
        kinds: list[int] = []
        # Of each stage what is left, with what it waits for, its own index and its kind.
        left = [iter(self._steps(stage, works[stage][added:])) for stage, added in enumerate(state.added)]
        waiting: dict[int, tuple[int, tuple[int, int, int]]] = {}
        ready: list[tuple[int, tuple[int, int, int] | None]] = [(stage, None) for stage in range(len(works))]
        while ready:
            stage, step = ready.pop()
            before, steps = state.last[stage], left[stage]
            added = len(kinds)
            if step is None:
                step = next(steps, None)
            while step is not None:
                need, own, kind = step
                found = place[need]
                if found == _BEGINNING:
                    waiting[need] = stage, step
                    break
                before_all.append(before)
                needs.append(found)
                kinds.append(kind)
                before = place[own] = free
                free += 1
                if own in waiting:
                    ready.append(waiting.pop(own))
                step = next(steps, None)
            state.last[stage] = before
            state.added[stage] += len(kinds) - added
        state.free = free
        part.before.extend(before_all)
        part.needs.extend(needs)
        part.kinds.extend(kinds)

    def _steps(self, stage: int, works: list[int]) -> "zip[tuple[int, int, int]]":
        """Return for some passes of a stage what each waits for, its own place in the list of places, and its kind."""
        own, kind, width, needed = stage * self.size, stage * 2 * self.chunks, self.width, self._needed[stage]
        return zip(
            [needed[work] for work in works],
            [own + work for work in works],
            [kind + work // width for work in works],
            strict=True,
        )

    def _needs(self, stage: int) -> list[int]:
        """Return for each pass of a stage the one of another stage that it waits for, as an index of places."""
        found = [-1] * self.size
        for kind in range(2 * self.chunks):
            need = self.schedule.waits_for(stage, Work(kind >= self.chunks, kind % self.chunks, 0))
            if need is not None and need[0] != stage:
                first = need[0] * self.size + (need[1].forward * self.chunks + need[1].chunk) * self.width
                found[kind * self.width : (kind + 1) * self.width] = range(first, first + self.width)
        return found


def _alike(one: list[int], other: list[int]) -> list[int]:
    """Return what both lists begin with."""
    return one[: next((at for at, both in enumerate(zip(one, other, strict=False)) if both[0] != both[1]), len(other))]


walk = functools.lru_cache(maxsize=64)(_Walk)
