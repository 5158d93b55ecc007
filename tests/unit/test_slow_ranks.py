"""Who is slow, from the ranks' compute times: planted slowness is found in time, noise is not."""

import math
import random
from collections.abc import Iterator

import pytest

from megatron_ext.telemetry.stragglers import SlowRanks

STEP = 0.1  # seconds


def noisy(ranks: int, seed: int) -> Iterator[list[float]]:
    """Compute times of steps: all vary by 4%, one in twenty takes up to twice as long, and a third of the steps are
    slow on all ranks alike."""
    chance = random.Random(seed)
    while True:
        common = STEP * chance.choice((1.0, 1.0, 1.4))
        yield [
            common * (1.0 + chance.gauss(0.0, 0.04)) * (chance.uniform(1.3, 2.0) if chance.random() < 0.05 else 1.0)
            for _ in range(ranks)
        ]


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_noise_flags_nobody_in_a_thousand_steps(ranks: int) -> None:
    for seed in range(20):
        slow = SlowRanks([0] * ranks)
        times = noisy(ranks, seed)
        assert [slow.add(next(times)) for _ in range(1000)] == [([], [])] * 1000


@pytest.mark.parametrize("factor", [1.3, 2.0])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_slow_rank_is_found_while_it_is_slow(ranks: int, factor: float) -> None:
    for seed in range(20):
        slow, times = SlowRanks([0] * ranks), noisy(ranks, seed)
        for _ in range(50):
            assert slow.add(next(times)) == ([], [])
        found: list[int] = []
        for step in range(1, 41):
            values = next(times)
            values[1] *= factor
            became, _ = slow.add(values)
            found += [step] * len(became)
            assert {one.rank for one in became} <= {1}
        assert len(found) == 1, "it is named once"
        assert found[0] <= 15
        assert slow.slowest is not None
        assert (slow.slowest.rank, slow.slowest.peers) == (1, tuple(rank for rank in range(ranks) if rank != 1))
        assert slow.slowest.ratio == pytest.approx(factor, rel=0.15)
        ended = [one.rank for _ in range(30) for one in slow.add(next(times))[1]]
        assert (ended, slow.slow) == ([1], {})


def test_stages_are_compared_within_themselves() -> None:
    """The last stage computes the loss too: twice the time, and slow only where it is slower than its own kind."""
    slow = SlowRanks([0, 0, 1, 1])
    for _ in range(30):
        assert slow.add([0.1, 0.1, 0.2, 0.2]) == ([], [])
    found = [one for _ in range(12) for one in slow.add([0.1, 0.1, 0.2, 0.28])[0]]
    assert [(one.rank, one.peers) for one in found] == [(3, (2,))]
    alone = SlowRanks([0, 1])
    for _ in range(30):
        assert alone.add([0.1, 0.5]) == ([], [])
    assert alone.slowest is None


def test_times_that_a_rank_does_not_know_are_left_out() -> None:
    slow = SlowRanks([0, 0])
    for _ in range(30):
        slow.add([math.nan, 0.1])
    assert slow.slowest is None


def test_less_than_a_millisecond_is_no_matter() -> None:
    slow = SlowRanks([0, 0])
    assert [slow.add([0.0010, 0.0019]) for _ in range(30)] == [([], [])] * 30
    assert slow.slowest is not None
    assert slow.slowest.rank == 1
