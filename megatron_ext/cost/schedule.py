"""The order in which a pipeline stage works, as megatron-core's schedules or a table (`pipeline_tables.py`) have it,
and the microbatches that it holds meanwhile.

Without interleaving (1F1B) stage s runs p - s - 1 forward passes ahead and then one forward and one backward pass in
turn. With v chunks, microbatches pass in groups of N (by default p): a group passes chunk after chunk, and stage s runs
2 (p - s - 1) + (v - 1) N forward passes of chunks ahead (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

Which pass waits for which does not depend on times: one order of the passes (`Walk`) serves all pipelines with as many
stages, chunks and microbatches, however long these take.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from megatron_ext.config.derived.pipeline_table import Walk, rank_of
from megatron_ext.config.schema import Config
from megatron_ext.config.schema.layout_flags import V_SHAPED
from megatron_ext.pipeline_tables import Action, Rows, rows

Times = Sequence[Sequence[float]]
"""Seconds by stage and chunk."""


class Work(NamedTuple):
    """One pass of one microbatch through one chunk of a stage."""

    forward: bool
    chunk: int
    microbatch: int
    half: str = ""
    """Which part of a backward pass that is split: "inputs" or "weights"."""


@dataclass(frozen=True)
class Schedule:
    """The passes of every pipeline stage in a step, in their order.

    The planner, `megatron-ext draw-pipeline` and `--dry-run` take the order from here alone. `train/build.py` takes the
    engine's function that works in this order.
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

    def table(self) -> Rows:
        """Return the passes of all stages in the form of `pipeline_tables`, which numbers virtual stages."""
        return tuple(
            tuple(
                Action(chunk * self.stages + stage, "F" if forward else "B", microbatch)
                for forward, chunk, microbatch, _ in self.order(stage)
            )
            for stage in range(self.stages)
        )

    def rank_of(self, virtual: int) -> int:
        """Return the stage that has a virtual stage."""
        return virtual % self.stages

    def messages(self, stage: int) -> int:
        """Return how many messages a stage sends for one microbatch."""
        sent = Counter[int]()
        for virtual in range(self.stages * self.chunks - 1):
            here, there = self.rank_of(virtual), self.rank_of(virtual + 1)
            if here != there:
                sent.update((here, there))
        return sent[stage]

    def total(self, forward: Times, backward: Times, delay: float) -> float:
        """Return when a step ends (see `ends`)."""
        return _walk(self).total(self._seconds(forward, backward), delay)

    def ends(self, forward: Times, backward: Times, delay: float = 0.0) -> dict[tuple[int, Work], float]:
        """Return when each pass ends, by stage and pass, each stage's in its order.

        Args:
            forward, backward: seconds of one microbatch by stage and chunk.
            delay: seconds of one message.
        """
        done = _walk(self).ends(self._seconds(forward, backward), delay)
        return {
            (stage, work): done[action]
            for stage, row in enumerate(self.table())
            for action, work in zip(row, self.order(stage), strict=True)
        }

    def _seconds(self, forward: Times, backward: Times) -> list[float]:
        """Return the seconds of each kind of pass, virtual stage by virtual stage."""
        inputs, weights = (self.share(Work(False, 0, 0, half)) for half in ("inputs", "weights"))
        places = [(self.rank_of(each), each // self.stages) for each in range(self.stages * self.chunks)]
        pairs = ((forward[stage][chunk], backward[stage][chunk]) for stage, chunk in places)
        return [each for ahead, back in pairs for each in (ahead, back, back * inputs, back * weights)]

    def share(self, work: Work) -> float:
        """Return which share of its chunk's pass this one takes."""
        return 1.0

    @property
    def bubble(self) -> float:
        """How long a stage waits in a step, in microbatches: of stages that are alike, (p-1)/v."""
        return (self.stages - 1) / self.chunks

    @property
    def least_bubble(self) -> float:
        """Lower bound of the bubble, whatever the times of the stages."""
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


@functools.lru_cache(maxsize=64)
def _walk(schedule: Schedule) -> Walk:
    return Walk(schedule.table(), schedule.stages * schedule.chunks)


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
    """Return `most_held` of a stage's step without going through all of its passes: chunks that are alike hold most at
    the first pass after the passes ahead, others before their pattern repeats with whole groups."""
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


_HALVES = {"F": "", "B": "", "I": "inputs", "W": "weights"}


@dataclass(frozen=True)
class TableSchedule(Schedule):
    """A schedule that is given pass by pass. `stages` are ranks here, as in every `Schedule`."""

    rows: Rows = ()
    v_shaped: bool = False
    """Whether a rank's second chunk is the one as far from the end as the first is from the beginning."""

    weights_share: float = 0.5
    """Share of a backward pass that the gradients of the weights take."""

    def order(self, stage: int) -> tuple[Work, ...]:
        return tuple(
            Work(kind == "F", virtual // self.stages, microbatch, _HALVES[kind])
            for virtual, kind, microbatch in self.rows[stage]
        )

    def table(self) -> Rows:
        return self.rows

    def share(self, work: Work) -> float:
        return {"": 1.0, "inputs": 1.0 - self.weights_share, "weights": self.weights_share}[work.half]

    def rank_of(self, virtual: int) -> int:
        return rank_of(virtual, self.stages, v_shaped=self.v_shaped)

    def few(self) -> "TableSchedule":
        return self

    @property
    def bubble(self) -> float:
        return _bubble(self)

    @property
    def least_bubble(self) -> float:
        return 0.0


@functools.lru_cache(maxsize=64)
def _bubble(schedule: TableSchedule) -> float:
    """Return how long the busiest rank waits, in microbatches, where all chunks are alike and F, I and W take as long
    as each other."""
    of_all = [[1.0 / schedule.chunks] * schedule.chunks] * schedule.stages
    total = schedule.total(of_all, [[2 * each for each in chunks] for chunks in of_all], 0.0)
    return total / 3.0 - schedule.microbatches


def schedule_of(config: Config, microbatches: int) -> Schedule:
    """Return the schedule that the flags ask for."""
    layout, name = config.layout, config.layout.table
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    if name is None or stages == 1:
        return Schedule(stages, chunks, microbatches, layout.microbatch_group_size if chunks > 1 else 1)
    return named(name, stages, chunks, microbatches)


def schedule_without_gradients(config: Config, microbatches: int) -> TableSchedule:
    """Return the order of the forward passes of an evaluation where --pipeline-schedule names a table, which for some
    has no number of microbatches as small as an evaluation's: groups pass one stage after another, and nothing of them
    is kept."""
    layout, name = config.layout, config.layout.table
    ranks, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    schedule = TableSchedule(ranks, chunks, microbatches, v_shaped=name in V_SHAPED)
    group = 2 * ranks
    by_rank: list[list[Action]] = [[] for _ in range(ranks)]
    for first, virtual in product(range(0, microbatches, group), range(ranks * chunks)):
        own = range(first, min(first + group, microbatches))
        by_rank[schedule.rank_of(virtual)] += [Action(virtual, "F", microbatch) for microbatch in own]
    return replace(schedule, rows=tuple(map(tuple, by_rank)))


def named(name: str, stages: int, chunks: int, microbatches: int) -> TableSchedule:
    """Return a schedule of torch by its name."""
    found = rows(name, stages, chunks, microbatches)
    return TableSchedule(stages, chunks, microbatches, rows=found, v_shaped=name in V_SHAPED)
