"""The order in which a pipeline stage works, as megatron-core's schedules have it, and what it holds on the way.

Without interleaving (1F1B) stage s runs p - s - 1 forward passes ahead and then one forward and one backward pass in
turn. With v chunks, microbatches pass in groups of N (by default p): a group passes chunk after chunk, and stage s runs
2 (p - s - 1) + (v - 1) N forward passes of chunks ahead (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
"""

import functools
from collections.abc import Sequence
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
