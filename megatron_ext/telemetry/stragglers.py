"""Finds ranks that compute longer than others which do the same work: a hot GPU, a busy machine, a bad memory.

A slow rank makes all others wait, and so all steps are equally long on all ranks. What differs is the time that a rank
computes, which is what is compared: between the ranks of one pipeline stage, which hold equally many layers and take
equally many samples. A stage with a single rank is compared with nobody.

A rank is slow when it computed 15% longer than its peers' median in 9 of the last 12 steps, and 20% and 1 ms longer by
the median of these steps. Steps that are slow here or there, as by Python's garbage collector, flag nobody; a rank
that has become 1.3 times as slow is found after 9 steps. It is slow until fewer than 6 of 12 steps are.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

_WINDOW, _MOST, _FEW = 12, 9, 6  # steps
_STEP_RATIO, _RATIO = 1.15, 1.2
_LEAST_SECONDS = 0.001


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


class SlowRanks:
    """Compares ranks step by step.

    Args:
        stages: the pipeline stage of each rank.
    """

    def __init__(self, stages: Sequence[int]):
        self._peers = {
            rank: tuple(other for other, its in enumerate(stages) if its == stage and other != rank)
            for rank, stage in enumerate(stages)
        }
        self._steps: deque[Sequence[float]] = deque(maxlen=_WINDOW)
        self._slow: dict[int, Slowness] = {}
        self.slowest: Slowness | None = None
        """The rank with the highest ratio; None before enough steps were compared, and where no rank has peers."""

    @property
    def slow(self) -> Mapping[int, Slowness]:
        """The ranks that are slow now."""
        return self._slow

    def add(self, seconds: Sequence[float]) -> tuple[list[Slowness], list[Slowness]]:
        """Take the compute seconds of one step, one a rank (NaN where a rank does not know it).

        Returns:
            The ranks that have become slow, and those that no longer are.
        """
        if any(math.isnan(value) for value in seconds):
            return [], []
        self._steps.append(seconds)
        if len(self._steps) < _WINDOW:
            return [], []
        found = {rank: self._compared(rank) for rank, peers in self._peers.items() if peers}
        became = [slowness for rank, (slowness, steps) in found.items() if rank not in self._slow and steps >= _MOST]
        became = [slowness for slowness in became if _is_slow(slowness)]
        ended = [slowness for rank, (slowness, steps) in found.items() if rank in self._slow and steps < _FEW]
        self._slow = {slowness.rank: slowness for slowness in (*(found[rank][0] for rank in self._slow), *became)}
        for slowness in ended:
            del self._slow[slowness.rank]
        self.slowest = max((slowness for slowness, _ in found.values()), key=lambda each: each.ratio, default=None)
        return became, ended

    def _compared(self, rank: int) -> tuple[Slowness, int]:
        """Return a rank's slowness and in how many steps it was slow."""
        peers = self._peers[rank]
        own = [step[rank] for step in self._steps]
        others = [median(step[peer] for peer in peers) for step in self._steps]
        ratios = [mine / theirs if theirs > 0.0 else 1.0 for mine, theirs in zip(own, others, strict=True)]
        slowness = Slowness(rank, median(ratios), median(own), median(others), peers)
        return slowness, sum(ratio >= _STEP_RATIO for ratio in ratios)


def _is_slow(slowness: Slowness) -> bool:
    return slowness.ratio >= _RATIO and slowness.seconds - slowness.peers_seconds >= _LEAST_SECONDS
