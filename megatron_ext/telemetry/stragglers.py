"""Finds ranks that compute longer than others which do the same work: a hot GPU, a busy machine, a bad memory.

A slow rank makes all others wait, and so all steps are equally long on all ranks. What differs is the time that a rank
computes, which is what is compared: between the ranks of one pipeline stage, which hold equally many layers and take
equally many samples. A stage with a single rank is compared with nobody. The ratio of a step is a rank's time over the
median of its peers'.

Two rules name a rank:

- **It computes slowly.** Its own time, without that in which others had its core, was 8% longer in 13 of the last 16
  steps, and 20% and 1 ms longer by the median of these steps. A rank that has become 1.3 times as slow is found
  after 13 to 16 steps. Steps that are slow here or there, as by Python's garbage collector, flag nobody, and neither
  does a second in which something else runs on a rank's core. It is slow until fewer than 8 of 16 steps are.
  A rank whose core is shared computes slower for seconds, too: it finds less of what it needs in the caches. Where the
  rank or its peers had less than half of their cores in the 16 steps, these must be 40% longer by the median, or else
  the last 48 steps are asked too: 8% longer in 39 of them, and 20% by their median.
- **Its core is shared.** By the clock it computed 15% longer in each of the last 8 groups of 25 steps, and 25% longer
  in all, and had its core for less than 90% of that time. It is so until the last two groups together are less than
  15% longer. On a GPU, which a rank has to itself, nobody is named for this.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_WINDOW, _MOST, _FEW = 16, 13, 8  # steps
_STEP_RATIO, _RATIO = 1.08, 1.2
_LEAST_OF_A_CORE, _CERTAIN_RATIO = 0.5, 1.4
_LONG, _MOST_OF_LONG = 48, 39  # steps
_LEAST_SECONDS = 0.001

_GROUP, _GROUPS, _LAST_GROUPS = 25, 8, 2  # steps of a group, groups
_GROUP_RATIO, _SHARED_RATIO = 1.15, 1.25
_MOST_OF_A_CORE = 0.9


@dataclass(frozen=True)
class Slowness:
    """How one rank's computing compares with its peers', over the last steps."""

    rank: int
    ratio: float
    """Its time over the median of its peers'; the median over steps."""

    seconds: float
    """Its time of a step; the median."""

    peers_seconds: float
    """The median of its peers' times; the median over steps."""

    peers: tuple[int, ...]

    of_a_core: float | None = None
    """Where its core is shared: for which part of its time it had it. The times are then by the clock, and means."""


class SlowRanks:
    """Compares ranks step by step.

    Args:
        stages: the pipeline stage of each rank.
    """

    def __init__(self, stages: Sequence[int]):
        of_stage = [np.flatnonzero(np.asarray(stages) == stage) for stage in sorted(set(stages))]
        self._stages = [ranks for ranks in of_stage if len(ranks) > 1]
        self._own = _Steps(len(stages))
        self._clock = _Groups(len(stages))
        self._slow: set[int] = set()
        self._shared: set[int] = set()

    @property
    def slow(self) -> frozenset[int]:
        """The ranks that are slow now, for either reason."""
        return frozenset(self._slow | self._shared)

    @property
    def slowest(self) -> Slowness | None:
        """The rank with the highest ratio of own times; None before enough steps were compared, and where no rank has
        peers."""
        if not self._stages or not self._own.are_enough:
            return None
        return self._slowness(self._own.slowest)

    def add(self, own: Sequence[float], clock: Sequence[float] | None = None) -> tuple[list[Slowness], list[Slowness]]:
        """Take the compute seconds of one step, one a rank (NaN where a rank does not know it).

        Args:
            own: without the time in which others had a rank's core.
            clock: by the clock; none: the same.
        Returns:
            The ranks that have become slow, and those that no longer are.
        """
        mine = np.array(own)
        if not self._stages or np.isnan(mine).any():
            return [], []
        whole = mine if clock is None else np.array(clock)
        of_a_core = mine / np.maximum(whole, 1e-9)
        self._own.add(mine, self._others(mine), np.minimum(of_a_core, self._others(of_a_core)))
        became, ended = self._compare_steps()
        if self._clock.add(mine, whole):
            shared, free = self._compare_groups()
            became += shared
            ended += free
        return became, ended

    def _compare_steps(self) -> tuple[list[Slowness], list[Slowness]]:
        if not self._own.are_enough:
            return [], []
        slow_steps = self._own.slow_steps(_WINDOW)
        ended = sorted(_ranks(slow_steps < _FEW) & self._slow)
        often = sorted(_ranks(slow_steps >= _MOST) - self._slow)
        became = [found for found in map(self._found_slow, often) if found is not None]
        self._slow = (self._slow | {found.rank for found in became}) - set(ended)
        return became, [self._slowness(rank) for rank in ended]

    def _found_slow(self, rank: int) -> Slowness | None:
        """Return how slow a rank is that was slow in most of the last steps; None where that is too little."""
        found = self._slowness(rank)
        if _is_slow(found, _RATIO if self._own.of_a_core(rank) >= _LEAST_OF_A_CORE else _CERTAIN_RATIO):
            return found
        found = self._slowness(rank, _LONG)
        return found if self._own.slow_steps(_LONG)[rank] >= _MOST_OF_LONG and _is_slow(found, _RATIO) else None

    def _compare_groups(self) -> tuple[list[Slowness], list[Slowness]]:
        """Compare the sums of groups of steps by the clock."""
        clock, own = self._clock.sums()
        each = [self._ratios(group) for group in clock]
        free = _ranks(self._ratios(np.sum(clock[-_LAST_GROUPS:], axis=0)) < _GROUP_RATIO) & self._shared
        total, ran = np.sum(clock, axis=0), np.sum(own, axis=0)
        ratio, of_a_core = self._ratios(total), ran / np.maximum(total, 1e-9)
        shared: set[int] = set()
        if len(clock) == _GROUPS:
            always = np.all([ratios >= _GROUP_RATIO for ratios in each], axis=0)
            shared = _ranks(always & (ratio >= _SHARED_RATIO) & (of_a_core < _MOST_OF_A_CORE)) - self.slow
        self._shared = (self._shared | shared) - free

        def of(rank: int) -> Slowness:
            steps = _GROUP * len(clock)
            mine, others = float(total[rank]) / steps, float(self._others(total)[rank]) / steps
            return Slowness(rank, float(ratio[rank]), mine, others, self._peers(rank), float(of_a_core[rank]))

        return [of(rank) for rank in sorted(shared)], [of(rank) for rank in sorted(free)]

    def _slowness(self, rank: int, steps: int = _WINDOW) -> Slowness:
        return Slowness(rank, *self._own.medians(rank, steps), self._peers(rank))

    def _peers(self, rank: int) -> tuple[int, ...]:
        (stage,) = (ranks for ranks in self._stages if rank in ranks)
        return tuple(int(other) for other in stage if other != rank)

    def _others(self, seconds: np.ndarray) -> np.ndarray:
        """Return the median of each rank's peers; NaN for a rank without."""
        found = np.full(len(seconds), np.nan)
        for ranks in self._stages:
            found[ranks] = _medians_of_others(seconds[ranks])
        return found

    def _ratios(self, seconds: np.ndarray) -> np.ndarray:
        return _ratios(seconds, self._others(seconds))


class _Steps:
    """The last steps, in rings: own times, the medians of the peers', their ratios, and for which part of its time a
    rank had its core, or its peers theirs, whichever is less.

    Args:
        ranks: number of ranks.
    """

    def __init__(self, ranks: int):
        self._own, self._others, self._ratios, self._of_a_core = (np.zeros((_LONG, ranks)) for _ in range(4))
        self._steps = 0

    def add(self, own: np.ndarray, others: np.ndarray, of_a_core: np.ndarray) -> None:
        place = self._steps % _LONG
        self._own[place], self._others[place], self._ratios[place] = own, others, _ratios(own, others)
        self._of_a_core[place] = of_a_core
        self._steps += 1

    @property
    def are_enough(self) -> bool:
        return self._steps >= _WINDOW

    def slow_steps(self, steps: int) -> np.ndarray:
        """Return in how many of the last steps each rank was slow."""
        return np.count_nonzero(self._ratios[self._last(steps)] >= _STEP_RATIO, axis=0)

    @property
    def slowest(self) -> int:
        """The rank with the highest median ratio."""
        return int(np.nanargmax(np.median(self._ratios[self._last(_WINDOW)], axis=0)))

    def medians(self, rank: int, steps: int) -> tuple[float, float, float]:
        """Return a rank's ratio, time, and its peers' time, of the last steps."""
        places, kept = self._last(steps), (self._ratios, self._own, self._others)
        ratio, own, others = (float(np.median(values[places, rank])) for values in kept)
        return ratio, own, others

    def of_a_core(self, rank: int) -> float:
        """Return for which part of their time the rank and its peers had their cores, at least."""
        return float(np.median(self._of_a_core[self._last(_WINDOW), rank]))

    def _last(self, steps: int) -> np.ndarray:
        return np.arange(self._steps - min(steps, self._steps), self._steps) % _LONG


class _Groups:
    """Sums over groups of steps, by the clock and of own times."""

    def __init__(self, ranks: int):
        self._sums: deque[tuple[np.ndarray, np.ndarray]] = deque(maxlen=_GROUPS)
        self._clock, self._own, self._steps = np.zeros(ranks), np.zeros(ranks), 0

    def add(self, own: np.ndarray, clock: np.ndarray) -> bool:
        """Return whether this step ends a group."""
        self._clock, self._own, self._steps = self._clock + clock, self._own + own, self._steps + 1
        if self._steps < _GROUP:
            return False
        self._sums.append((self._clock, self._own))
        self._clock, self._own, self._steps = np.zeros_like(clock), np.zeros_like(own), 0
        return True

    def sums(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Return those of the last groups."""
        return [clock for clock, _ in self._sums], [own for _, own in self._sums]


def _ranks(are: np.ndarray) -> set[int]:
    return {int(rank) for rank in np.flatnonzero(are)}


def _is_slow(found: Slowness, least: float) -> bool:
    return found.ratio >= least and found.seconds - found.peers_seconds >= _LEAST_SECONDS


def _ratios(seconds: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return 1 where the others took no time; NaN where there are none."""
    nothing = others == 0.0
    return np.where(nothing, 1.0, seconds / np.where(nothing, 1.0, others))


def _medians_of_others(values: np.ndarray) -> np.ndarray:
    """Return, for each of several values, the median of all the others."""
    order = np.argsort(values, kind="stable")
    ordered, place = values[order], np.empty_like(order)
    place[order] = np.arange(len(values))

    def other(index: int) -> np.ndarray:
        """Return the others' value at an index in ascending order."""
        return ordered[np.where(place <= index, index + 1, index)]

    return (other((len(values) - 2) // 2) + other((len(values) - 1) // 2)) / 2.0
