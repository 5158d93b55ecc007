"""What a rank makes of the others' numbers: stand-ins for collectives give it theirs, and results are compared by
value."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import sinkhorn

from megatron_ext.data.packing import Segment
from megatron_ext.inference import scoring
from megatron_ext.inference.generation import _Batch
from megatron_ext.inference.scoring import Scorable, Score, score
from megatron_ext.model.context_parallel import _in_chunks, _in_order, _neighbours, _visible, segments_of_rank
from megatron_ext.model.moe import Router
from megatron_ext.train import spikes
from megatron_ext.train.callbacks.evaluation import Evaluation
from megatron_ext.train.callbacks.stopping import Stopping

NOTHING: Any = None


def _group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def test_the_ring_goes_one_way() -> None:
    """Who is sent to receives from the sender; a rank's own keys are causal, earlier ones half, later ones for half of
    the queries."""
    assert [_neighbours(rank, 4) for rank in range(4)] == [(1, 3), (2, 0), (3, 1), (0, 2)]
    everything = slice(0, 8)
    assert _visible(1, 1, 8) == (everything, everything, True)
    assert _visible(1, 0, 8) == (everything, slice(0, 4), False)
    assert _visible(1, 2, 8) == (slice(4, 8), everything, False)


def test_chunks_of_the_head_and_of_the_tail_see_what_is_before_them() -> None:
    assert segments_of_rank(0, 2, 16) == (Segment(0, 4, 0, 4), Segment(4, 4, 0, 16))
    assert segments_of_rank(1, 2, 16) == (Segment(0, 4, 0, 8), Segment(4, 4, 0, 12))
    whole = torch.arange(2 * 16).view(1, 16, 2)
    parts = _in_chunks(whole, 2)
    assert parts[1, 0, :, 0].tolist() == [8, 10, 12, 14, 16, 18, 20, 22]
    assert torch.equal(_in_order(parts), whole)


@pytest.mark.parametrize("rank", range(3))
def test_the_load_so_far_is_that_of_earlier_microbatches(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three data-parallel ranks the microbatches of one turn come one after another."""
    turns = [torch.tensor([[4, 0], [3, 1], [0, 4]]), torch.tensor([[2, 2], [1, 3], [0, 4]])]
    router: Any = Router.__new__(Router)
    torch.nn.Module.__init__(router)
    router.dp_group = _group(rank, 3)
    router.reset_global_aux_loss_tracker()
    for number, everyones in enumerate(turns):
        monkeypatch.setattr(
            torch.distributed,
            "all_gather_into_tensor",
            lambda out, own, group, everyones=everyones: out.copy_(everyones.flatten()),
        )
        before = torch.cat(turns)[: 3 * number + rank + 1].double()
        assert router._load_so_far(everyones[rank]).tolist() == pytest.approx(before.mean(0).tolist())


@pytest.mark.parametrize("rank", range(2))
def test_a_balanced_assignment_is_of_all_tokens(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    router: Any = SimpleNamespace(tp_cp_group=_group(rank, 2))
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", lambda out, own, group: out.copy_(logits))
    assert torch.equal(Router._balanced(router, logits.chunk(2)[rank]), sinkhorn(logits).chunk(2)[rank])


def _scored(rank: int, size: int) -> Any:
    made: Any = object.__new__(scoring._Scored)
    made._model = SimpleNamespace(groups=SimpleNamespace(tp=_group(rank, size)), vocab_size=6)
    return made


@pytest.mark.parametrize("rank", range(2))
def test_the_likeliest_token_of_a_divided_vocabulary(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several that are as likely the first, as on one rank."""
    logits = torch.tensor([[0.0, 5.0, 1.0, 5.0], [1.0, 0.0, 2.0, 7.0], [3.0, 0.0, 0.0, 3.0], [0.0, 1.0, 4.0, 0.0]])
    parts = logits.chunk(2, dim=1)

    def gather(everyones: list[torch.Tensor], own: torch.Tensor, group: Any) -> None:
        for other, out in enumerate(everyones):
            values, tokens = parts[other].max(-1)
            out.copy_(torch.stack((values.double(), (tokens + 2 * other).double())))
        assert torch.equal(everyones[rank], own)

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    expected = logits.argmax(-1)
    assert expected.tolist() == [1, 3, 0, 2]
    assert _scored(rank, 2)._best(parts[rank]).tolist() == expected.tolist()
    assert _scored(0, 1)._best(logits).tolist() == expected.tolist()


@pytest.mark.parametrize("rank", range(2))
def test_one_of_those_that_hold_the_same_scores_counts(rank: int) -> None:
    """Tensor-parallel ranks have the same numbers, which are summed over all ranks."""
    summed: list[list[list[float]]] = []
    model: Any = SimpleNamespace(
        device=SimpleNamespace(torch_device=torch.device("cpu")),
        groups=SimpleNamespace(tp=_group(rank, 2)),
        config=SimpleNamespace(model=SimpleNamespace(padded_vocab_size=8)),
        replica=0,
        replicas=1,
        at_work=nullcontext,
        forward=lambda tokens, positions, read: torch.tensor([[-1.0, 1.0], [-2.0, 0.0], [-4.0, 1.0]]).double(),
        sum_over_ranks=lambda results: summed.append(results.tolist()),
    )
    found = score(model, [Scorable([1, 2, 3], 2), Scorable([1, 2], 1)], 2)
    expected = [[-3.0, 1.0], [-4.0, 0.0]] if rank == 0 else [[0.0, 0.0]] * 2
    assert summed == [expected]
    assert found == [Score(log_likelihood, misses == 0.0) for log_likelihood, misses in expected]


@pytest.mark.parametrize("most", [1, 3])
def test_as_many_tokens_are_made_as_are_asked_for(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch: Any = object.__new__(_Batch)
    batch.sampling = SimpleNamespace(max_new_tokens=most)
    taken: list[int] = []
    monkeypatch.setattr(_Batch, "_cached_passes", lambda batch: iter(range(9)))
    monkeypatch.setattr(_Batch, "_chosen", lambda batch, logits: logits)
    monkeypatch.setattr(_Batch, "_take", lambda batch, chosen, on_token: taken.append(chosen))
    monkeypatch.setattr(_Batch, "_all_finished", lambda batch: False)
    batch.run(True, None)
    assert taken == list(range(most))
    monkeypatch.setattr(_Batch, "_all_finished", lambda batch: True)
    batch.run(True, None)
    assert len(taken) == most + 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_strongest_reason_of_any_rank_stops_all(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGTERM on each of two ranks is no other signal."""
    asked: list[Any] = []

    def all_reduce(seen: torch.Tensor, op: Any) -> None:
        asked.append(op)
        other = torch.tensor([1, 1], dtype=torch.int32)
        seen.copy_(seen + other if op == torch.distributed.ReduceOp.SUM else torch.maximum(seen, other))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    signals: Any = SimpleNamespace(requested=True, reason="SIGTERM")
    device = SimpleNamespace(torch_device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(stop_votes=None, run=SimpleNamespace(world_size=ranks, device=device))
    assert Stopping(signals, None, None)._of_all_ranks(trainer) == (1, ranks == 2)
    assert asked == ([torch.distributed.ReduceOp.MAX] if ranks == 2 else [])


def test_what_the_metrics_file_has_is_the_last_ranks_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(
        torch.distributed,
        "broadcast_object_list",
        lambda fields, src: told.append(src) or fields.__setitem__(0, {"validation_loss"}),
    )
    callback: Any = object.__new__(Evaluation)
    callback.metrics_file = "nowhere"
    trainer: Any = SimpleNamespace(run=SimpleNamespace(is_last_rank=False, world_size=3))
    assert callback._known(trainer, 5) == {"validation_loss"}
    assert told == [2]


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_look_at_a_batch_leaves_the_generators_as_they_are(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the recorder, also where the look fails; it is made with the generators of before the step."""
    state = ["after"]
    run: Any = SimpleNamespace(recorder="recorder", groups=SimpleNamespace(dp=_group(0, 1), ep=_group(0, 1)))
    given: list[Any] = []

    def run_again(run: Any, count: int, samples: range, states: Any, shift: int) -> torch.Tensor:
        given.append((run.recorder, list(states), shift))
        state[0] = "changed"
        if fails:
            raise KeyError
        return torch.ones(1, 2)

    for name, value in {
        "random_state": lambda run: state[0],
        "set_random_state": lambda run, wanted: state.__setitem__(0, wanted),
        "_run_again": run_again,
        "_of_all": lambda run, losses: {0: [1.0]},
        "_differing": lambda results, run: [],
    }.items():
        monkeypatch.setattr(spikes, name, value)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda states, own, group: states.__setitem__(0, own))
    with pytest.raises(KeyError) if fails else nullcontext():
        spikes.judge(run, torch.ones(1, 2), range(4), "before")  # pyright: ignore[reportArgumentType]
    assert given == [(None, ["before"], 0)]
    assert (state, run.recorder) == (["after"], "recorder")
