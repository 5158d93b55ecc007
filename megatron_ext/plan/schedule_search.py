"""Searches a table of a pipeline's passes (`pipeline_tables.py`) for measured times and a limit of memory.

A greedy scheduler in the manner of Qi et al. 2023 (arXiv:2401.10241, section 3.1): a rank that is free runs what others
wait for, a backward pass of inputs, then a forward pass where the limit allows it, and gradients of weights where it
would wait, or has no memory left. How long a gap has to be for them, what goes first, and how many forward passes of
the first chunk run ahead differ from try to try, and half of the tries make the order as if all passes took as long;
the shortest step wins, of equals the one that holds least. torch's own tables are tried as well, and of a V with a
limit the building blocks of Qi et al. 2024 (arXiv:2405.15362, section 3): V-Min, V-Half and what lies between.

The limit is as in Qi et al. 2024 (arXiv:2405.15362): microbatches of activations that a rank may hold, from a forward
pass to the gradients of its weights. A forward pass leaves room for what comes after it in the later chunks of its
rank, so that a microbatch can go on.
"""

import heapq
import itertools
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_ext.config.derived.pipeline_table import KINDS, Walk, rank_of
from megatron_ext.pipeline_tables import Action, Rows
from megatron_ext.plan.schedule import most_held, named


@dataclass(frozen=True)
class Pipeline:
    """What a schedule is made for. Times are in one unit, by virtual stage."""

    ranks: int
    chunks: int
    microbatches: int
    forward: Sequence[float]
    inputs: Sequence[float]
    weights: Sequence[float]
    send: float = 0.0
    """Time of a message between ranks."""
    limit: float = float("inf")
    """Microbatches of activations that a rank may hold: at least 1."""
    v_shaped: bool = False

    def seconds(self, action: Action) -> float:
        """Return the time of a pass."""
        if action.kind == "B":
            return self.inputs[action.stage] + self.weights[action.stage]
        return {"F": self.forward, "I": self.inputs, "W": self.weights}[action.kind][action.stage]


@dataclass(frozen=True)
class Found:
    """A table, and what it reaches."""

    rows: Rows
    total: float
    bubble: float
    """Time of a step that the busiest rank waits, over the time that it works."""
    held: float
    """Most microbatches of activations that a rank holds."""


def best(pipeline: Pipeline, seconds: float = 8.0) -> Found:
    """Return the best table that is found.

    Args:
        seconds: after so many of this process no further try is begun.
    """
    until = time.process_time() + seconds
    found: list[Found] = []
    for one in _found(pipeline):
        found += [one] if one is not None else []
        if found and time.process_time() > until:
            break
    return min(found, key=lambda one: (round(one.total, 9), one.held))


def _found(pipeline: Pipeline) -> Iterator[Found | None]:
    """Yield what each try has found, None for one that has found nothing."""
    limits = {min(pipeline.limit, pipeline.ranks * factor) for factor in (1.0, 1.5, 2.0)}
    tries = itertools.product((0.0, 0.5, 1.0), (True, False), (True, False), sorted(limits))
    each = [sum(times) for times in zip(pipeline.forward, pipeline.inputs, pipeline.weights, strict=True)]
    of_ranks = [0.0] * pipeline.ranks
    for virtual, seconds in enumerate(each):
        of_ranks[rank_of(virtual, pipeline.ranks, v_shaped=pipeline.v_shaped)] += seconds
    work, each = max(of_ranks), [1.0] * len(each)
    alike = replace(pipeline, forward=each, inputs=each, weights=each, send=0.0)
    makers: Iterator[_Maker] = (
        _Maker(of, gap, max(limit, 1.0), deepest=deepest, alternates=alternates)
        for (gap, deepest, alternates, limit), of in itertools.product(tries, (pipeline, alike))
    )
    blocks = _blocks(pipeline.ranks, pipeline.limit) if pipeline.v_shaped and pipeline.limit < float("inf") else ()
    planned = (_Planned(pipeline, block) for block in blocks)
    in_turns = itertools.chain.from_iterable(itertools.zip_longest(planned, makers))
    for made in itertools.chain(_known(pipeline), (maker.made() for maker in in_turns if maker is not None)):
        if made is None or made[1] > pipeline.limit:
            yield None
        else:
            total = step_time(pipeline, made[0])
            yield Found(made[0], total, total / (pipeline.microbatches * work) - 1.0, made[1])


def _known(pipeline: Pipeline) -> Iterator[tuple[Rows, float]]:
    """Yield the tables that torch has for as many ranks, chunks and microbatches."""
    ranks, chunks, microbatches = pipeline.ranks, pipeline.chunks, pipeline.microbatches
    names = ["zbv", "dualpipe-v"][: 1 + (microbatches >= 2 * ranks)] if pipeline.v_shaped else []
    if not names and microbatches % max(1, microbatches // ranks) == 0:
        names = ["interleaved-zero-bubble"]
    for table in (named(name, ranks, chunks, microbatches) for name in names):
        each = [1.0 / chunks] * chunks, [0.0] * chunks
        yield (table.rows, max(most_held(table.order(rank), *each).bytes for rank in range(ranks)))


_Block = list[tuple[int, int, int, int]]
"""When each rank of a V runs the first microbatch's forward pass in its first and its second chunk, and the gradients
of inputs in its second and first chunk, in units of one such pass; each further microbatch runs `_PERIOD` later."""

_PERIOD = 6
"""A rank's passes of a microbatch: two forward passes, and two halves of two backward passes."""


def _blocks(ranks: int, limit: float) -> list[_Block]:
    """Return the building blocks in which no two passes of a rank fall on the same moment: first those whose
    microbatches live as long as the limit allows."""
    found: list[tuple[bool, float, _Block]] = []
    shifts = range(1, _PERIOD)
    for down, up, back_down, back_up in itertools.product(shifts, repeat=4):
        if down + back_up > _PERIOD or up + back_down > _PERIOD:
            continue  # it would hold more than 1F1B
        for turn, loss, back_turn in itertools.product(range(1, _PERIOD + 1), repeat=3):
            block: _Block = []
            for rank in range(ranks):
                behind = ranks - 1 - rank
                second = down * (ranks - 1) + turn + up * behind
                back = second + up * rank + loss + back_down * rank
                passes = (down * rank, second, back, back + (back_down + back_up) * behind + back_turn)
                if len({moment % _PERIOD for moment in passes}) < len(passes):
                    break
                block.append(passes)
            else:
                held = max(last - first + back - second for first, second, back, last in block) / (2 * _PERIOD)
                found.append((held > limit, -held, block))
    return [block for *_, block in sorted(found)]


def step_time(pipeline: Pipeline, table: Rows) -> float:
    """Return how long a step takes in the order of a table."""
    return max(pass_ends(pipeline, table).values())


def pass_ends(pipeline: Pipeline, table: Rows) -> dict[Action, float]:
    """Return when each pass of a table ends."""
    stages = range(pipeline.ranks * pipeline.chunks)
    seconds = [pipeline.seconds(Action(stage, kind, 0)) for stage in stages for kind in KINDS]
    return Walk(table, len(stages)).ends(seconds, pipeline.send)


class _Maker:
    """One try: goes through time, and gives each rank that is free its next pass.

    Args:
        gap: share of a gradient of weights that must fit into a wait for it to run there.
        limit: microbatches that a rank may hold in this try.
        deepest: whether the latest chunk's forward pass goes first, or the earliest microbatch's.
        alternates: whether a forward pass follows each backward pass, where one can run.
    """

    def __init__(self, pipeline: Pipeline, gap: float, limit: float, *, deepest: bool, alternates: bool):
        self.of, self.gap, self.limit, self.deepest, self.alternates = pipeline, gap, limit, deepest, alternates
        self.last = pipeline.ranks * pipeline.chunks - 1
        self.rank = [rank_of(stage, pipeline.ranks, v_shaped=pipeline.v_shaped) for stage in range(self.last + 1)]
        ranks = range(pipeline.ranks)
        self.rows: list[list[Action]] = [[] for _ in ranks]
        self.forwards: list[list[tuple[float, Action]]] = [[] for _ in ranks]
        """(arrival, pass) of every forward pass that could run; of inputs likewise."""
        self.inputs: list[list[tuple[float, Action]]] = [[] for _ in ranks]
        self.weights: list[deque[Action]] = [deque() for _ in ranks]
        self.held, self.most = [0.0] * pipeline.ranks, [0.0] * pipeline.ranks
        self.begun = [0] * (self.last + 1)

    def made(self) -> tuple[Rows, float] | None:
        """Return the table and the most that a rank holds; None where ranks are full of microbatches of which none can
        go on."""
        self.forwards[0] = [(0.0, Action(0, "F", 0))]
        free = [(0.0, rank) for rank in range(self.of.ranks)]
        left, idle = 3 * (self.last + 1) * self.of.microbatches, 0
        times = [*self.of.forward, *self.of.inputs, *self.of.weights]
        most_idle = self.of.ranks * (10 + 4 * (max(times) + self.of.send) / min(times))
        """So often may ranks look for a pass and find none while another runs, or its result is sent."""
        while left:
            now, rank = heapq.heappop(free)
            action, begin = self._next(rank, now)
            if action is None:
                idle += 1
                if idle > most_idle:
                    return None
                heapq.heappush(free, (max(begin, now + 1e-9), rank))
                continue
            end = begin + self.of.seconds(action)
            self._run(action, rank, end)
            heapq.heappush(free, (end, rank))
            left, idle = left - 1, 0
        return tuple(map(tuple, self.rows)), max(self.most)

    def _next(self, rank: int, now: float) -> tuple[Action | None, float]:
        """Return the next pass of a rank and when it begins; or none, and when to ask again."""
        waits = [(arrival, self._order(action), action) for arrival, action in self._possible(rank)]
        here = [one for one in waits if one[0] <= now + 1e-12]
        if here:
            return min(here, key=lambda one: one[1])[2], now
        soonest = min(waits, default=None, key=lambda one: one[0])
        due = self.weights[rank][0] if self.weights[rank] else None
        if due is not None and (soonest is None or soonest[0] - now >= self.gap * self.of.seconds(due)):
            return due, now
        if soonest is not None:
            return None, soonest[0]
        return None, now + min(*self.of.forward, *self.of.inputs, *self.of.weights) / 4

    def _possible(self, rank: int) -> Iterator[tuple[float, Action]]:
        yield from self.inputs[rank]
        unit = 1.0 / self.of.chunks
        for arrival, action in self.forwards[rank]:
            later = self.of.chunks - action.stage // self.of.ranks
            if self.held[rank] + later * unit <= self.limit + 1e-9:
                yield arrival, action

    def _order(self, action: Action) -> tuple[float, ...]:
        rank = self.rank[action.stage]
        after_backward = bool(self.rows[rank]) and self.rows[rank][-1].kind != "F"
        forward_first = self.alternates and after_backward
        deep = -action.stage if self.deepest == (action.kind == "F") else 0
        return (action.kind == "F") != forward_first, deep, action.microbatch, action.stage

    def _run(self, action: Action, rank: int, end: float) -> None:
        stage, kind, microbatch = action
        self.rows[rank].append(action)
        unit = 1.0 / self.of.chunks
        if kind == "F":
            self.forwards[rank] = [one for one in self.forwards[rank] if one[1] != action]
            self.held[rank] += unit
            self.most[rank] = max(self.most[rank], self.held[rank])
            if stage == 0 and microbatch + 1 < self.of.microbatches:
                self.forwards[rank].append((end, Action(0, "F", microbatch + 1)))
            if stage == self.last:
                self.inputs[rank].append((end, Action(stage, "I", microbatch)))
            else:
                self._arrives(self.forwards, Action(stage + 1, "F", microbatch), rank, end)
        elif kind == "I":
            self.inputs[rank] = [one for one in self.inputs[rank] if one[1] != action]
            self.weights[rank].append(Action(stage, "W", microbatch))
            if stage > 0:
                self._arrives(self.inputs, Action(stage - 1, "I", microbatch), rank, end)
        else:
            self.weights[rank].popleft()
            self.held[rank] -= unit

    def _arrives(self, queues: list[list[tuple[float, Action]]], action: Action, of: int, end: float) -> None:
        rank = self.rank[action.stage]
        queues[rank].append((end + self.of.send * (rank != of), action))


class _Planned(_Maker):
    """A try with forward passes and gradients of inputs in the order of a building block."""

    def __init__(self, pipeline: Pipeline, block: _Block):
        super().__init__(pipeline, 0.0, pipeline.limit, deepest=True, alternates=True)
        self.planned: list[deque[Action]] = []
        for rank, moments in enumerate(block):
            stages = rank, self.last - rank
            each = list(zip(moments, (*stages, *reversed(stages)), "FFII", strict=True))
            order = sorted(
                (moment + _PERIOD * microbatch, Action(stage, kind, microbatch))
                for microbatch in range(pipeline.microbatches)
                for moment, stage, kind in each
            )
            self.planned.append(deque(action for _, action in order))

    def _possible(self, rank: int) -> Iterator[tuple[float, Action]]:
        room = self.held[rank] + 0.5 <= self.limit + 1e-9  # the order itself leaves room for later chunks
        for arrival, action in (*self.inputs[rank], *(self.forwards[rank] if room else ())):
            if action == self.planned[rank][0]:
                yield arrival, action

    def _run(self, action: Action, rank: int, end: float) -> None:
        super()._run(action, rank, end)
        if action.kind != "W":
            self.planned[rank].popleft()
