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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Work(NamedTuple):
    """One pass of one microbatch through one chunk of a stage."""

    forward: bool
    chunk: int
    microbatch: int


@functools.lru_cache(maxsize=1024)
def order(stage: int, stages: int, chunks: int, microbatches: int, group: int) -> tuple[Work, ...]:
    """Return everything that a stage does in a step, in this order.

    Args:
        group: microbatches that one chunk takes before the next one's turn; without interleaving it has no effect.
    """
    if stages == 1:
        return tuple(Work(forward, 0, m) for m in range(microbatches) for forward in (True, False))
    table = table_of_passes(chunks, microbatches, group)
    forward = [Work(True, chunk, microbatch) for chunk, microbatch in table]
    backward = [Work(False, chunks - 1 - chunk, microbatch) for chunk, microbatch in table]
    return tuple(in_turn(forward, backward, ahead(stage, stages, chunks, group)))


def ahead(stage: int, stages: int, chunks: int, group: int) -> int:
    """Return how many forward passes a stage works before its first pair of a forward and a backward pass, where there
    are as many."""
    passes = stages - stage - 1
    return passes if chunks == 1 else 2 * passes + (chunks - 1) * group


def in_turn[T](forward: Sequence[T], backward: Sequence[T], ahead: int) -> list[T]:
    """Return the passes of a stage in the order in which it works: some forward ones ahead, then each kind in turn."""
    ahead = min(ahead, len(forward))
    steady = [work for pair in zip(forward[ahead:], backward, strict=False) for work in pair]
    return [*forward[:ahead], *steady, *backward[len(forward) - ahead :]]


@functools.lru_cache(maxsize=256)
def table_of_passes(chunks: int, microbatches: int, group: int) -> tuple[tuple[int, int], ...]:
    """Return (chunk, microbatch) of every forward pass of a stage; its backward passes have the chunks the other way
    round."""
    if chunks == 1:
        return tuple((0, microbatch) for microbatch in range(microbatches))
    starts = range(0, microbatches, group)
    return tuple(
        (chunk, microbatch)
        for start in starts
        for chunk in range(chunks)
        for microbatch in range(start, min(start + group, microbatches))
    )


def waits_for(stage: int, work: Work, stages: int, chunks: int) -> tuple[int, Work] | None:
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


class Most(NamedTuple):
    """The moment at which a stage holds most."""

    bytes: float
    chunk: int
    """The chunk whose pass runs."""

    flight: list[int]
    """Number of microbatches of each chunk between their forward and their backward pass."""


@functools.lru_cache(maxsize=4096)
def most_held_of_stage(
    stage: int,
    stages: int,
    microbatches: int,
    group: int,
    held: tuple[float, ...],
    for_a_while: tuple[float, ...],
) -> Most:
    """Return `most_held` of what a stage does in a step, without a look at all of it: chunks that are alike hold most
    in the first pass behind those ahead, and others before whole groups repeat what they hold."""
    chunks = len(held)
    forward, first = table_of_passes(chunks, microbatches, group), ahead(stage, stages, chunks, group)
    if len(set(held)) == len(set(for_a_while)) == 1 and held[0] > 0.0:
        begun = [chunk for chunk, _ in forward[: first + 1]]
        return Most(len(begun) * held[0] + for_a_while[0], begun[-1], [begun.count(chunk) for chunk in range(chunks)])
    works = order(stage, stages, chunks, microbatches, group)
    repeats = first + 2 * chunks * group + 2 if microbatches % group == 0 else len(works)
    return most_held(works[:repeats], held, for_a_while)


def most_held(works: Sequence[Work], held: Sequence[float], for_a_while: Sequence[float]) -> Most:
    """Return the most that a stage holds at any time.

    Args:
        held: bytes of one microbatch in each chunk, between its forward and its backward pass.
        for_a_while: further bytes while a chunk's pass runs.
    """
    now, most, place = 0.0, -1.0, 0
    for at, (forward, chunk, _) in enumerate(works):
        if forward:
            now += held[chunk]
        if now + for_a_while[chunk] > most:
            most, place = now + for_a_while[chunk], at
        if not forward:
            now -= held[chunk]
    flight = [0] * len(held)
    for forward, chunk, _ in works[:place]:
        flight[chunk] += 1 if forward else -1
    last = works[place]
    flight[last.chunk] += last.forward
    return Most(most, last.chunk, flight)


def few_microbatches(stages: int, chunks: int, microbatches: int, group: int) -> int:
    """Return the number of microbatches that show everything that more of them repeat: the pipeline filled, some
    groups, and emptied.

    It leaves the same incomplete last group.
    """
    period = group if chunks > 1 else 1
    enough = 4 * max(stages, group)
    if microbatches <= enough:
        return microbatches
    return enough // period * period + microbatches % period


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

    def __init__(self, stages: int, chunks: int, microbatches: int, group: int, shorter_by: int):
        self.stages, self.chunks, self.width, self.group = stages, chunks, microbatches, group
        self.common, self.whole, self.shorter = _Part(), _Part(), _Part()
        self.size = 2 * chunks * microbatches
        """Passes of a stage."""
        self._needed = [self._needs(stage) for stage in range(stages)]
        # Behind all of them, as the last of the list, what need not be waited for.
        state = _State([0] * stages, [_BEGINNING] * stages, [_BEGINNING] * (self.size * stages) + [_NOTHING])
        whole, self.last_of_shorter = self._works(microbatches), []
        if shorter_by:
            same = (microbatches - shorter_by) // shorter_by * shorter_by * chunks
            alike = [works[: self._before(stage, same)] for stage, works in enumerate(whole)]
            self._add(self.common, alike, state)
            other = state.copy()
            self._add(self.shorter, self._works(microbatches - shorter_by), other)
            self.last_of_shorter = other.last
        self._add(self.whole, whole, state)
        self.last = state.last

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

    def _works(self, microbatches: int) -> list[list[int]]:
        """Return what each stage does, as numbers: backward passes are before forward passes, then chunk by chunk."""
        table = table_of_passes(self.chunks, microbatches, self.group)
        forward = [(self.chunks + chunk) * self.width + microbatch for chunk, microbatch in table]
        backward = [(self.chunks - 1 - chunk) * self.width + microbatch for chunk, microbatch in table]
        return [in_turn(forward, backward, self._ahead(stage)) for stage in range(self.stages)]

    def _ahead(self, stage: int) -> int:
        return ahead(stage, self.stages, self.chunks, self.group)

    def _before(self, stage: int, forward: int) -> int:
        """Return how many passes a stage works before the forward pass of this index."""
        return forward + max(forward - self._ahead(stage), 0)

    def _add(self, part: _Part, works: list[list[int]], state: _State) -> None:
        """Give a place to every pass, up to those that wait for one which is not among them."""
        place, free = state.place, state.free
        before_all: list[int] = []
        needs: list[int] = []
        kinds: list[int] = []
        # Of each stage what is left, with what it waits for, its own index and its kind.
        left = [iter(self._steps(stage, works[stage][state.added[stage] :])) for stage in range(self.stages)]
        waiting: dict[int, tuple[int, tuple[int, int, int]]] = {}
        ready: list[tuple[int, tuple[int, int, int] | None]] = [(stage, None) for stage in range(self.stages)]
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
        half, last = self.size // 2, self.stages - 1
        if stage < last:
            backward = [(stage + 1) * self.size + work for work in range(half)]
        else:
            # The gradient of a chunk comes from the first stage, that of the model from its own forward pass.
            backward = [*range(self.width, half), *[-1] * self.width]
        if stage > 0:
            return backward + [(stage - 1) * self.size + work for work in range(half, self.size)]
        before = last * self.size
        return [*backward, *[-1] * self.width, *range(before + half, before + self.size - self.width)]


walk = functools.lru_cache(maxsize=64)(_Walk)
