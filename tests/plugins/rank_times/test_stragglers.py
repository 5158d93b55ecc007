"""Who is slow, from the ranks' compute times: planted slowness is found in time, noise is not."""

import json
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.plugins.rank_times import stragglers
from megatron_ext.plugins.rank_times.stragglers import SlowRanks

STEP = 0.1  # seconds
RECORDED = Path(__file__).parents[2] / "data" / "compute_times.json"
SLOW_CORES = RECORDED.with_name("slow_cores.json")


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


# Eight ranks are slow: the fewest ranks have the noisiest median.
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
        assert found[0] <= 16, "and then the times of a step are three or four steps on their way"
        assert slow.slowest is not None
        assert (slow.slowest.rank, slow.slowest.peers) == (1, tuple(rank for rank in range(ranks) if rank != 1))
        assert slow.slowest.ratio == pytest.approx(factor, rel=0.15)
        ended = [one.rank for _ in range(30) for one in slow.add(next(times))[1]]
        assert (ended, slow.slow) == ([1], frozenset())


Times = Sequence[Sequence[float]]


def named(own: Times, loops: Times | None = None) -> list[tuple[int, int]]:
    """Return (step, rank) of those that become slow; steps count from 1."""
    slow = SlowRanks([0] * len(own[0]))
    loops = [[0.0] * len(own[0])] * len(own) if loops is None else loops
    became = [slow.add(*times)[0] for times in zip(own, loops, strict=True)]
    return [(step, one.rank) for step, found in enumerate(became, 1) for one in found]


@pytest.mark.parametrize(("ratio", "step"), [(1.07, None), (1.17, None), (1.19, 41), (1.3, 41), (2.0, 41)])
def test_the_eleventh_slow_step_of_sixteen_names_a_rank(ratio: float, step: int | None) -> None:
    assert named([[0.1, 0.1]] * 30 + [[0.1, 0.1 * ratio]] * 30) == ([(step, 1)] if step else [])
    assert named([[0.1, 0.1 * ratio]] * 16 + [[0.1, 0.1]] * 30) == ([(16, 1)] if step else [])


def test_ten_slow_steps_name_nobody_and_five_may_be_quick_between() -> None:
    quick, slow = [0.1, 0.1], [0.1, 0.2]
    assert named([quick] * 30 + [slow] * 10 + [quick] * 30) == []
    assert named([quick] * 30 + [slow] * 6 + [quick] * 5 + [slow] * 5) == [(46, 1)]
    assert named([quick] * 30 + [slow] * 6 + [quick] * 6 + [slow] * 11) == [(53, 1)]


def test_a_rank_is_slow_until_half_of_the_steps_are_quick() -> None:
    slow = SlowRanks([0, 0])
    for _ in range(16):
        slow.add([0.1, 0.2])
    ended = [[one.rank for one in slow.add([0.1, 0.1])[1]] for _ in range(16)]
    assert ended == [[]] * 8 + [[1]] + [[]] * 7


@pytest.mark.parametrize("episode", sorted(json.loads(RECORDED.read_text()).keys() - {"about"}))
def test_a_core_that_is_taken_for_a_second_makes_nobody_slow(episode: str) -> None:
    """Recorded on two cores, where other programs ran: by the clock one rank was slow for so long that it would be
    named. What each computed in was not."""
    rows = np.array(json.loads(RECORDED.read_text())[episode]) / 1000.0
    clock, own = rows[:, 0::2].tolist(), rows[:, 1::2].tolist()
    assert len(named(clock)) == 1
    assert named(own) == []
    for rank in range(2):
        slowed = [[value * (2.0 if one == rank else 1.0) for one, value in enumerate(step)] for step in own]
        assert named(slowed) == [(16, rank)]


@pytest.mark.parametrize("episode", sorted(json.loads(SLOW_CORES.read_text()).keys() - {"about"}))
def test_a_core_that_is_slow_for_a_second_makes_nobody_slow(episode: str) -> None:
    rows = np.array(json.loads(SLOW_CORES.read_text())[episode])
    _, own, loops = (rows[:, column::3] for column in range(3))
    assert len(named(own.tolist())) == 1, "its own time alone would have named a rank"
    assert named(own.tolist(), loops.tolist()) == []
    for rank in range(2):
        slowed = own * [2.0 if one == rank else 1.0 for one in range(2)]
        ((step, found),) = named(slowed.tolist(), loops.tolist())
        assert (step <= 18, found) == (True, rank)


def test_only_a_loop_that_is_a_tenth_longer_counts_and_a_step_is_less_longer_than_its_loop() -> None:
    own = [[0.1, 0.13]] * 30
    assert named(own, [[1e-5, 1.09e-5]] * 30) == [(16, 1)]
    assert named(own, [[1e-5, 1.15e-5]] * 30) == [], "1.3 / 1.15 ** 0.75 is less than 1.18"
    assert named(own, [[1.6e-5, 1e-5]] * 30) == [(16, 1)], "a peer's slow core excuses nobody"
    assert named([[0.1, 0.2]] * 30, [[1e-5, 1.6e-5]] * 30) == [(16, 1)], "2 / 1.6 ** 0.75 is 1.41"
    assert named([[0.1, 0.16]] * 30, [[1e-5, 1.6e-5]] * 30) == []
    assert named(own, [[0.0, 0.0]] * 30) == [(16, 1)], "which is what GPUs say"
    slow = SlowRanks([0, 0])
    for _ in range(16):
        slow.add([0.1, 0.2], [1e-5, 1.6e-5])
    assert slow.slowest is not None
    assert (slow.slowest.seconds, slow.slowest.peers_seconds) == pytest.approx((0.2 / 1.6**0.75, 0.1))


def test_a_slow_rank_is_not_well_again_because_its_core_is_slow_as_well() -> None:
    slow = SlowRanks([0, 0])
    equal, slower = [1e-5, 1e-5], [1e-5, 1.6e-5]
    said = [slow.add([0.1, 0.13], equal) for _ in range(16)]
    said += [slow.add([0.1, 0.13 * 1.05], slower) for _ in range(50)]
    said += [slow.add([0.1, 0.13], equal) for _ in range(16)]
    found = [(step, [one.rank for one in became], ended) for step, (became, ended) in enumerate(said, 1)]
    assert [each for each in found if each[1] or each[2]] == [(16, [1], [])]
    assert [bool(slow.add([0.1, 0.1], equal)[1]) for _ in range(9)] == [False] * 8 + [True]


def test_each_rank_is_compared_with_the_median_of_all_others() -> None:
    chance = np.random.default_rng(1)
    for ranks in (2, 3, 4, 7, 8):
        values = chance.choice(5, ranks) / 4.0 if ranks > 4 else chance.random(ranks)
        expected = [statistics.median(np.delete(values, rank).tolist()) for rank in range(ranks)]
        assert stragglers._medians_of_others(values).tolist() == expected


def test_stages_are_compared_within_themselves() -> None:
    """The last stage computes the loss too: twice the time, and slow only where it is slower than its own kind."""
    slow = SlowRanks([0, 0, 1, 1])
    for _ in range(30):
        assert slow.add([0.1, 0.1, 0.2, 0.2]) == ([], [])
    found = [one for _ in range(16) for one in slow.add([0.1, 0.1, 0.2, 0.28])[0]]
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


@pytest.mark.parametrize("unknown", [0, 1, 2])
def test_a_step_that_one_rank_does_not_know_is_left_out_for_all(unknown: int) -> None:
    slow, own = SlowRanks([0, 0, 0]), [0.1, 0.1, 0.2]
    with_gap = [math.nan if rank == unknown else seconds for rank, seconds in enumerate(own)]
    for _ in range(15):
        assert slow.add(own) == ([], [])
        assert slow.add(with_gap) == ([], [])
    assert slow.slowest is None
    assert [found.rank for found in slow.add(own)[0]] == [2]
