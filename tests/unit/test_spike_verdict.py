"""Who is to blame for a loss that another run does not repeat, from losses written by hand."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.train import spikes
from megatron_ext.train.spikes import Computed, Place, _add, _differing, _distance, _mean, _shifts, _suspects


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
    ],
)
def test_the_suspect_of_a_microbatch(runs: list[tuple[int, float]], suspect: int) -> None:
    assert _suspects([[Computed(*one) for one in runs]]) == [suspect]


def test_the_replica_of_most_microbatches_is_named_first() -> None:
    low, high = [Computed(0, 9.0), Computed(1, 2.0)], [Computed(0, 2.0), Computed(1, 9.0)]
    assert _suspects([low, high, high]) == [1, 0]


def _again(
    monkeypatch: pytest.MonkeyPatch, second: list[float], third: list[float], *, experts: int | None = None
) -> tuple[Any, list[Any]]:
    """Judge two microbatches of rank 1 of three replicas, whose losses were 1 and 2; and what is done meanwhile."""
    done: list[Any] = []
    losses = iter([second, third])

    def again(run: Any, batches: Any, *, forward_only: bool) -> list[float]:
        assert (forward_only, torch.is_grad_enabled(), run.recorder) == (True, False, None)
        done.append(("run", batches))
        return next(losses)

    @contextmanager
    def gathered(chunks: Any) -> Iterator[None]:
        done.append("gathered")
        yield

    def of_all(run: Any, found: Any) -> dict[int, list[float]]:
        """Every replica computes what belongs to the one that it stands for: all the same."""
        return {replica: list(found) for replica in range(3)}

    def gather(states: list[Any], own: str, group: str) -> None:
        assert (own, group) == ("before", run.groups.dp)
        states[:] = ["before 0", "before 1", "before 2"]

    for name, value in (
        ("random_state", lambda run: "after"),
        ("set_random_state", lambda run, state: done.append(state)),
        ("run_microbatches", again),
        ("_of_all", of_all),
        ("take_auxiliary_losses", lambda groups: done.append("auxiliary losses")),
    ):
        monkeypatch.setattr(spikes, name, value)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    run = _run(3)
    run.groups.dp.rank = lambda: 1
    run.config.model = SimpleNamespace(num_experts=experts)
    run.recorder, run.chunks, run.sharding = "recorder", [], SimpleNamespace(gathered_before_update=gathered)
    run.progress = SimpleNamespace(loading=nullcontext)
    run.loaders = SimpleNamespace(
        train=SimpleNamespace(microbatches_of=lambda replica, first, count: f"{count} of {replica} from {first}")
    )
    first: Any = [1.0, 2.0]
    verdict = spikes.judge(run, first, range(24, 36), "before")
    assert run.recorder == "recorder"
    return verdict, done


def test_each_run_is_that_of_another_replica_with_its_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third only where the second gave another loss; afterwards the generators go on where they were."""
    second = ["before 2", "gathered", ("run", "2 of 2 from 24")]
    third = ["before 0", "gathered", ("run", "2 of 0 from 24")]
    verdict, done = _again(monkeypatch, [1.0, 2.0], [])
    assert (verdict.differing, verdict.suspects, done) == ([], [], [*second, "after"])
    verdict, done = _again(monkeypatch, [1.0, 3.0], [1.0, 2.0])
    assert done == [*second, *third, "after"]
    assert verdict.differing == [Place(0, 1), Place(1, 1), Place(2, 1)]
    assert [one.loss for one in verdict.results[Place(0, 1)]] == [2.0, 3.0, 2.0]


def test_auxiliary_losses_of_a_second_run_are_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    _, done = _again(monkeypatch, [1.0, 2.0], [], experts=4)
    assert done[-2:] == ["auxiliary losses", "after"]
