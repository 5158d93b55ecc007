"""Who is to blame for a loss that another run does not repeat, from losses written by hand."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.data.skipped import SkippedSamples
from megatron_ext.errors import NumericError, StorageError
from megatron_ext.train import spikes
from megatron_ext.train.callbacks import spikes as callback
from megatron_ext.train.spikes import Computed, Place, Verdict, _add, _differing, _distance, _mean, _shifts, _suspects
from megatron_ext.train.step import BatchLoss
from tests.support.small_models import small_config


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


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("tensor_rank", [0, 1])
def test_one_of_those_that_have_the_same_losses_tells_them(
    last: bool, tensor_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first tensor-parallel rank of the last stage. Context-parallel ranks have parts of each microbatch, whose
    mean is over the tokens of all."""
    losses = torch.tensor([[6.0, 2.0], [0.0, 0.0]])
    told = (1, 0, [[6.0, 2.0], [0.0, 0.0]]) if last and tensor_rank == 0 else None

    def gather(found: list[Any], own: Any) -> None:
        assert own == told
        assert len(found) == 5
        found[:] = [None, (1, 1, [[1.0, 5.0], [0.0, 0.0]]), told or (1, 0, [[6.0, 2.0], [0.0, 0.0]]), None, None]
        found[3] = (0, 0, [[4.0, 2.0], [9.0, 3.0]])

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    places = {"dp": 1, "cp": 0, "tp": tensor_rank}
    groups = SimpleNamespace(**{name: SimpleNamespace(rank=lambda rank=rank: rank) for name, rank in places.items()})
    run: Any = SimpleNamespace(is_last_stage=last, groups=groups, world_size=5)
    found = spikes._of_all(run, losses)
    assert list(found) == [0, 1]
    assert found[0] == [2.0, 3.0]
    assert found[1][0] == 1.0
    assert math.isnan(found[1][1])


def test_ranks_and_machines_of_a_replica_have_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in the order of their numbers; each machine once."""

    def gather(found: list[Any], own: Any) -> None:
        assert own == (1, 3, "here")
        found[:] = [(0, 10, "a"), (1, 3, "here"), (0, 9, "a"), (1, 2, "b"), (2, 1, "c")]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(spikes.socket, "gethostname", lambda: "here")
    run: Any = SimpleNamespace(groups=SimpleNamespace(dp=SimpleNamespace(rank=lambda: 1)), rank=3, world_size=5)
    assert spikes.who(run) == {
        0: "ranks 9, 10 (machine a)",
        1: "ranks 2, 3 (machines b, here)",
        2: "rank 1 (machine c)",
    }


def test_of_two_runs_the_one_without_a_number_is_suspected_wherever_it_stands() -> None:
    for runs in ([(0, 9.0), (1, math.nan)], [(0, math.nan), (1, 9.0)]):
        wrong = next(replica for replica, loss in runs if math.isnan(loss))
        assert _suspects([[Computed(*one) for one in runs]]) == [wrong]


def test_the_state_of_the_generators_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the device's and of the engine's own; what is put back later can be put back once more."""
    kept = {"model-parallel": torch.tensor([1, 2])}
    tracker = SimpleNamespace(get_states=lambda: kept, set_states=lambda states: kept.update(states))
    monkeypatch.setattr(spikes.tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    of_device: list[str] = ["first"]
    run: Any = SimpleNamespace(
        device=SimpleNamespace(rng_state=lambda: of_device[0], set_rng_state=lambda state: of_device.insert(0, state))
    )
    before = spikes.random_state(run)
    for _ in range(2):
        kept["model-parallel"] += 5
        of_device.insert(0, "later")
        spikes.set_random_state(run, before)
        assert (of_device[0], kept["model-parallel"].tolist()) == ("first", [1, 2])


@pytest.mark.parametrize(("replicas", "copies"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("asked", [None, 0, 5])
def test_weights_that_differ_explain_another_loss(
    replicas: bool, copies: bool, asked: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas are compared where the flags have it compared: elsewhere there may be none. The worst microbatch is
    told of, and the suspects in their order."""
    results = {
        Place(2, 1): [Computed(2, 1.0), Computed(0, 9.0)],
        Place(0, 0): [Computed(0, 1.0), Computed(1, 2.0)],
    }
    verdict = Verdict(results, [Place(2, 1), Place(0, 0)], [0, 2])

    def check(name: str, differ: bool) -> None:
        def compare(run: Any, last_good: int) -> None:
            assert last_good == 6
            if differ:
                raise NumericError(f"{name} differ; found at iteration 7, before")

        monkeypatch.setattr(callback, f"check_{name}", compare)

    check("data_parallel_replicas", replicas)
    check("model_parallel_copies", copies)
    monkeypatch.setattr(callback, "who", lambda run: {0: "rank 0", 1: "rank 1", 2: "rank 2"})
    # The neighbour's interval says nothing of replicas.
    training = {"check_weight_hash_across_dp_replicas_interval": asked, "check_replicated_weights_interval": 3}
    run: Any = SimpleNamespace(
        config=small_config(training=training),
        state=SimpleNamespace(iteration=6),
    )
    found = callback._hardware(run, "it", verdict)
    which = "data_parallel_replicas" if replicas and asked else "model_parallel_copies" if copies else None
    weights = f" Their weights differ: {which} differ." if which else ""
    assert str(found) == (
        "it, and the same samples and weights give another loss when they are computed again: microbatch 1 of "
        "data-parallel rank 2 has 1 on rank 2, 9 on rank 0. Suspect: rank 0, then rank 2."
        f"{weights} This iteration changed no weight. Next: take that machine out and resume from the last checkpoint"
    )


def test_a_folder_of_a_spike_that_cannot_be_written_is_a_matter_of_storage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(save=str(tmp_path / "file")), training=SimpleNamespace(micro_batch_size=1)
    )
    run: Any = SimpleNamespace(
        rank=0,
        config=config,
        state=SimpleNamespace(iteration=6),
        loaders=SimpleNamespace(skipped=SkippedSamples()),
        groups=SimpleNamespace(dp=SimpleNamespace(size=lambda: 1)),
    )
    results = {Place(0, 0): [Computed(0, 9.0)]}
    nothing: Any = None
    with pytest.raises(StorageError, match=r"^cannot write .*/file/spike-7: Not a directory\. Free space there$"):
        callback._data(run, "it", Verdict(results, [], []), BatchLoss(9.0, nothing, range(8, 9)), 5.0)
