"""Who is to blame for a loss that another run does not repeat, and what a second look leaves as it was.

tests/distributed/test_loss_spikes.py has ranks that compute wrong losses.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.plugins.silent_errors.spikes import (
    Computed,
    Place,
    _add,
    _differing,
    _distance,
    _mean,
    _shifts,
    _suspects,
    judge,
    random_state,
    set_random_state,
    who,
)
from megatron_ext.train.step import compute_gradients
from tests.support.small_runs import built


def _run(replicas: int = 4, sharing: int = 1, params_bytes: int = 4) -> Any:
    groups = SimpleNamespace(
        dp=SimpleNamespace(size=lambda: replicas), ep=SimpleNamespace(size=lambda: sharing, rank=lambda: 0)
    )
    return SimpleNamespace(groups=groups, config=SimpleNamespace(training=SimpleNamespace(params_bytes=params_bytes)))


def test_a_mean_is_over_the_tokens_of_all_parts() -> None:
    """Context-parallel ranks hold other numbers of tokens that count."""
    assert _mean([(6.0, 2.0), (1.0, 5.0)]) == 1.0
    assert math.isnan(_mean([(0.0, 0.0), (0.0, 0.0)]))


@pytest.mark.parametrize(
    ("one", "other", "far"),
    [
        (2.0, 4.0, 0.5),
        (4.0, 2.0, 0.5),
        (-1.0, 1.0, 2.0),
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
        (math.nan, 1.0, math.inf),
        (1.0, math.nan, math.inf),
        (1.0, math.inf, math.inf),
        (math.inf, -math.inf, math.inf),
    ],
)
def test_distances_are_relative(one: float, other: float, far: float) -> None:
    assert _distance(one, other) == far


@pytest.mark.parametrize(
    ("replicas", "sharing", "shifts"), [(1, 1, (0, 0)), (2, 1, (1, 0)), (3, 1, (1, 2)), (8, 2, (2, 4)), (2, 2, (1, 0))]
)
def test_the_third_run_is_in_yet_another_place(replicas: int, sharing: int, shifts: tuple[int, int]) -> None:
    """Ranks that share experts meet the same ones again, unless they move on by as many."""
    assert _shifts(_run(replicas, sharing)) == shifts


def test_what_a_replica_computed_belongs_to_the_one_it_stood_for() -> None:
    results: Any = {}
    _add(results, {0: [1.0, 2.0], 1: [3.0, 4.0], 2: [5.0, 6.0]}, 0)
    _add(results, {0: [3.0, 4.0], 1: [5.0, 6.0], 2: [1.0, 2.0]}, 1)
    assert results[Place(0, 1)] == [Computed(0, 2.0), Computed(2, 2.0)]
    assert all(len({one.loss for one in runs}) == 1 for runs in results.values())


def test_rounding_is_no_difference_and_the_largest_comes_first() -> None:
    results = {
        Place(0, 0): [Computed(0, 1.0), Computed(1, 1.005)],
        Place(0, 1): [Computed(0, 1.0), Computed(1, 1.00005)],
        Place(1, 0): [Computed(1, 2.0), Computed(0, 4.0)],
    }
    assert _differing(results, _run()) == [Place(1, 0), Place(0, 0)]
    assert _differing(results, _run(params_bytes=2)) == [Place(1, 0)]


@pytest.mark.parametrize(
    ("runs", "suspect"),
    [
        # Who contradicts itself, be it lower than the others.
        ([(0, 1.0), (1, 5.0), (0, 2.0)], 0),
        ([(0, 5.0), (1, 3.0), (1, 5.0)], 1),
        # Whom the two others contradict, who agree.
        ([(0, 9.0), (1, 2.0), (2, 2.00001)], 0),
        ([(0, 2.0), (1, 1.0), (2, 2.00001)], 1),
        # Of two replicas, the one with the higher loss; NaN is higher than anything.
        ([(0, 2.0), (1, 3.0)], 1),
        ([(0, math.nan), (1, 3.0)], 0),
        ([(0, 9.0), (1, math.nan)], 1),
    ],
)
def test_the_suspect_of_a_microbatch(runs: list[tuple[int, float]], suspect: int) -> None:
    assert _suspects([[Computed(*one) for one in runs]]) == [suspect]


def test_the_replica_of_most_microbatches_is_named_first() -> None:
    low, high = [Computed(0, 9.0), Computed(1, 2.0)], [Computed(0, 2.0), Computed(1, 9.0)]
    assert _suspects([low, high, high]) == [1, 0]


def _drawn() -> list[float]:
    return torch.rand(3).tolist()


def test_generators_can_be_put_back_more_than_once() -> None:
    with built() as run:
        before = random_state(run)
        expected = _drawn()
        for _ in range(2):
            set_random_state(run, before)
            assert _drawn() == expected


class Fails(Exception):
    """What the second look meets."""


def test_a_second_look_at_a_batch_repeats_its_dropout_and_leaves_the_generators_as_they_are() -> None:
    """Also where the look fails, and the recorder of passes, which would count them."""
    fails: list[bool] = []
    graded: list[bool] = []

    def loss(token: Any) -> torch.Tensor:
        graded.append(torch.is_grad_enabled())
        if fails:
            raise Fails
        return token.cross_entropy()

    with built("--hidden-dropout 0.5 --num-experts 4 --disable-bias-linear", loss=loss) as run:
        before = random_state(run)
        gradients = compute_gradients(run, range(4))
        after = _drawn_after(run)
        graded.clear()
        verdict = judge(run, gradients.of_microbatches, gradients.samples, before)
        assert (verdict.differing, verdict.suspects) == ([], [])
        for first, second in verdict.results.values():
            assert first.loss == second.loss, "the same masks"
        assert graded == [False, False]
        assert _drawn_after(run) == after
        fails.append(True)
        with pytest.raises(Fails):
            judge(run, gradients.of_microbatches, gradients.samples, before)
        assert _drawn_after(run) == after


def _drawn_after(run: Any) -> list[float]:
    """Return what the generators would give, and leave them as they are."""
    state = random_state(run)
    drawn = _drawn()
    set_random_state(run, state)
    return drawn


def test_a_replica_is_named_by_its_ranks_and_machine() -> None:
    with built() as run:
        [(replica, name)] = who(run).items()
    assert replica == 0
    assert name.startswith("rank 0 (machine ")
