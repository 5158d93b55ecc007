"""Finds ranks that compute longer than others which do the same work: a hot GPU, a busy machine, a bad memory.

A slow rank makes all others wait, and so all steps are equally long on all ranks. Only the time that a rank computes
differs, so it is compared: between the ranks of one pipeline stage, which hold equally many layers and take equally
many samples. A stage with a single rank is not compared. The ratio of a step is a rank's time over the median of its
peers'.

A rank is named as slow if its own time was 8% longer in 11 of the last 16 steps, and 18% and 1 ms longer by the median
of these steps. A rank that has become 1.3 times as slow is found after 11 to 16 steps; where ranks had a third of a
core each, one was after 26 (docs/decisions.md). Single slow steps, for instance by Python's garbage collector, flag no
rank. It is slow until fewer than 8 of 16 steps are, whatever the speed of its core.

A rank's own time is the time in which no other process had its core, corrected for the speed of that core. Where the
device's fixed loop took more than 1.1 times as long as on the peers' cores, the own time is divided by that ratio to
the power of 0.75. Cores of a virtual machine change their speed for a second or longer, with the other load of the
host: the loop then takes 1.6 times as long, and a step of a small model 1.3 times (docs/decisions.md). No rank is named
for such a second.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_WINDOW, _MOST, _FEW = 16, 11, 8  # steps
_STEP_RATIO, _RATIO = 1.08, 1.18
_LOOP_RATIO, _STEP_FOR_LOOP = 1.1, 0.75  # by this power of the loop's ratio a step becomes longer
_LEAST_SECONDS = 0.001


@dataclass(frozen=True)
class Slowness:
    """How one rank's computing compares with its peers', over the last steps."""

    rank: int
    ratio: float
    """Its time over the median of its peers'; the median over steps."""

    seconds: float
    """The rank's seconds of a step; the median."""

    peers_seconds: float
    """The median of its peers' times; the median over steps."""

    peers: tuple[int, ...]


class SlowRanks:
    """Compares ranks step by step.

    Args:
        stages: the pipeline stage of each rank.
    """

    def __init__(self, stages: Sequence[int]):
        of_stage = [np.flatnonzero(np.asarray(stages) == stage) for stage in sorted(set(stages))]
        self._stages = [ranks for ranks in of_stage if len(ranks) > 1]
        self._own = _Steps(len(stages))
        self._slow: set[int] = set()

    @property
    def slow(self) -> frozenset[int]:
        """The ranks that are slow now."""
        return frozenset(self._slow)

    @property
    def slowest(self) -> Slowness | None:
        """The rank with the highest ratio of own times; None before enough steps were compared, and where no rank has
        peers."""
        if not self._stages or not self._own.are_enough:
            return None
        return self._slowness(self._own.slowest)

    def add(self, own: Sequence[float], loops: Sequence[float] | None = None) -> tuple[list[Slowness], list[Slowness]]:
        """Take the compute seconds of one step, one a rank (NaN where a rank does not know it).

        Args:
            own: without the time in which others had a rank's core.
            loops: of the devices' fixed loops; none: the same everywhere.
        Returns:
            The ranks that have become slow, and those that no longer are.
        """
        run = np.array(own)
        if not self._stages or np.isnan(run).any():
            return [], []
        mine = run if loops is None else run / self._longer_for_loops(np.array(loops))
        self._own.add(mine, run, self._others(run))
        if not self._own.are_enough:
            return [], []
        ended = sorted(_ranks(self._own.slow_steps_on_any_core < _FEW) & self._slow)
        often = sorted(_ranks(self._own.slow_steps >= _MOST) - self._slow)
        became = [slowness for slowness in map(self._slowness, often) if _is_slow(slowness)]
        self._slow = (self._slow | {slowness.rank for slowness in became}) - set(ended)
        return became, [self._slowness(rank) for rank in ended]

    def _longer_for_loops(self, loops: np.ndarray) -> np.ndarray:
        """Return how many times as long a step takes on each rank for the speed of its core alone."""
        ratios = self._ratios(loops)
        return np.where(ratios > _LOOP_RATIO, ratios, 1.0) ** _STEP_FOR_LOOP

    def _slowness(self, rank: int) -> Slowness:
        return Slowness(rank, *self._own.medians(rank), self._peers(rank))

    def _peers(self, rank: int) -> tuple[int, ...]:
        (stage,) = (ranks for ranks in self._stages if rank in ranks)
        return tuple(int(other) for other in stage if other != rank)

    def _others(self, seconds: np.ndarray) -> np.ndarray:
        """Return the median of each rank's peers; NaN for a rank without."""
        medians = np.full(len(seconds), np.nan)
        for ranks in self._stages:
            medians[ranks] = _medians_of_others(seconds[ranks])
        return medians

    def _ratios(self, seconds: np.ndarray) -> np.ndarray:
        return _ratios(seconds, self._others(seconds))


class _Steps:
    """The last steps, in rings: own times, the medians of the peers', their ratios, and these on cores as they were.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int):
        self._own, self._others, self._ratios, self._on_any_core = (np.zeros((_WINDOW, ranks)) for _ in range(4))
        self._steps = 0

    def add(self, own: np.ndarray, run: np.ndarray, others: np.ndarray) -> None:
        slot = self._steps % _WINDOW
        self._own[slot], self._others[slot], self._ratios[slot] = own, others, _ratios(own, others)
        self._on_any_core[slot] = _ratios(run, others)
        self._steps += 1

    @property
    def are_enough(self) -> bool:
        return self._steps >= _WINDOW

    @property
    def slow_steps(self) -> np.ndarray:
        """In how many of the last steps each rank was slow."""
        return np.count_nonzero(self._ratios >= _STEP_RATIO, axis=0)

    @property
    def slow_steps_on_any_core(self) -> np.ndarray:
        """In how many of the last steps each rank was slow, be it by the speed of its core."""
        return np.count_nonzero(self._on_any_core >= _STEP_RATIO, axis=0)

    @property
    def slowest(self) -> int:
        """The rank with the highest median ratio."""
        return int(np.nanargmax(np.median(self._ratios, axis=0)))

    def medians(self, rank: int) -> tuple[float, float, float]:
        """Return a rank's ratio, time, and its peers' time, of the last steps."""
        ratio, own, others = (float(np.median(kept[:, rank])) for kept in (self._ratios, self._own, self._others))
        return ratio, own, others


def _ranks(are: np.ndarray) -> set[int]:
    return {int(rank) for rank in np.flatnonzero(are)}


def _is_slow(slowness: Slowness) -> bool:
    return slowness.ratio >= _RATIO and slowness.seconds - slowness.peers_seconds >= _LEAST_SECONDS


def _ratios(seconds: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return 1 where the others took no time; NaN where there are none."""
    nothing = others == 0.0
    return np.where(nothing, 1.0, seconds / np.where(nothing, 1.0, others))


def _medians_of_others(values: np.ndarray) -> np.ndarray:
    """Return, for each of several values, the median of all the others."""
    order = np.argsort(values, kind="stable")
    ordered, position = values[order], np.empty_like(order)
    position[order] = np.arange(len(values))

    def other(index: int) -> np.ndarray:
        """Return the others' value at an index in ascending order."""
        return ordered[np.where(position <= index, index + 1, index)]

    return (other((len(values) - 2) // 2) + other((len(values) - 1) // 2)) / 2.0
