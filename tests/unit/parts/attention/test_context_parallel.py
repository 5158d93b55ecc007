"""What a rank makes of the others' numbers: stand-ins for collectives give it theirs, and results are compared by
value."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import sinkhorn

from megatron_ext.data.packing import Segment
from megatron_ext.inference import scoring
from megatron_ext.inference.generation import _Batch
from megatron_ext.inference.scoring import Scorable, Score, score
from megatron_ext.model.config import transformer_config
from megatron_ext.parts.attention import context_parallel
from megatron_ext.parts.attention.context_parallel import _in_chunks, _in_order, _neighbours, _visible, segments_of_rank
from megatron_ext.parts.attention.rope import RotaryTable, scaled_inverse_frequencies
from megatron_ext.parts.experts.compute import Router
from megatron_ext.parts.stack import stack
from megatron_ext.sharding import fsdp2
from megatron_ext.train import spikes
from megatron_ext.train.callbacks.evaluation import Evaluation
from megatron_ext.train.callbacks.stopping import Stopping
from tests.support.small_models import LLAMA, small_config

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


@pytest.mark.parametrize(("rank", "expected"), [(0, [0, 1, 6, 7]), (1, [2, 3, 4, 5])])
def test_angles_are_those_of_a_ranks_positions(rank: int, expected: list[int]) -> None:
    """Chunk after chunk, as a rank holds its tokens; scaled where the model is."""
    scaling = {"use_rope_scaling": True, "rope_scaling_factor": 4.0}
    config = small_config({**LLAMA, **scaling, "seq_length": 8}, layout={"context_parallel_size": 2, "world_size": 2})
    groups: Any = SimpleNamespace(cp=_group(rank, 2))
    [(kind, _)] = stack(config).kinds
    assert kind.attention.rotary is not None
    assert kind.attention.rotary.scaling is not None
    table = RotaryTable(kind.attention, transformer_config(config, "cpu"), groups)
    scaled = scaled_inverse_frequencies(1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16.0), kind.attention.rotary.scaling)
    assert not torch.equal(scaled, 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16.0) / 4.0)
    known = torch.tensor(expected)[:, None] * scaled
    torch.testing.assert_close(table.get_emb(8), torch.stack((known.cos(), known.sin())), rtol=1e-5, atol=1e-6)
    assert table.get_emb(1).tolist() == [[[1.0] * 8], [[0.0] * 8]], "one token is divided among no ranks"


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_gathered_at_a_time(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied word embeddings are needed at both ends: they belong to the model."""
    monkeypatch.setattr(fsdp2, "TransformerLayer", torch.nn.Linear)
    monkeypatch.setattr(fsdp2, "LanguageModelEmbedding", torch.nn.Embedding)
    embedding, first, last = torch.nn.Embedding(4, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    module = torch.nn.Sequential(embedding, torch.nn.Sequential(first, last))
    assert fsdp2._units(module, tied=tied) == [*([] if tied else [embedding]), first, last, module]


class _Posted:
    """Stands for an exchange of the ring: ranks are threads, and messages wait by place, step and tag."""

    boxes: defaultdict[tuple[int, int], SimpleQueue[torch.Tensor]]
    sent: list[tuple[int, torch.dtype]]

    def __init__(self, tensor: torch.Tensor, group: Any, tag: int):
        after, _ = _neighbours(group.rank(), group.size())
        self._own = self.boxes[group.rank(), tag]
        self.sent.append((tag, tensor.dtype))
        self.boxes[after, tag].put(tensor.detach().clone())

    def wait(self) -> torch.Tensor:
        return self._own.get(timeout=20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_is_attention_over_all_positions(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks, each with its chunks, in threads. Sums over ranks are kept in fp32 whatever travels."""
    ranks, scale = 3, 0.4
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, heads, 12, 8, generator=generator).to(dtype) for heads in (4, 2, 2, 4)]
    query, key, value = exact = [tensor.double().requires_grad_() for tensor in whole[:3]]
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    wanted = torch.autograd.grad(expected, exact, whole[3].double())
    parts = [_in_chunks(tensor, ranks) for tensor in whole]
    merged: set[torch.dtype] = set()
    genuine = context_parallel.merge

    def merge(out: torch.Tensor, *others: torch.Tensor) -> Any:
        merged.add(out.dtype)
        return genuine(out, *others)

    monkeypatch.setattr(_Posted, "boxes", defaultdict(SimpleQueue), raising=False)
    monkeypatch.setattr(_Posted, "sent", [], raising=False)
    monkeypatch.setattr(context_parallel, "_Exchange", _Posted)
    monkeypatch.setattr(context_parallel, "merge", merge)

    def forward(rank: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        query, key, value = heads = [part[rank].clone().requires_grad_() for part in parts[:3]]
        return context_parallel.attend_ring(query, key, value, _group(rank, ranks), scale), heads

    with ThreadPoolExecutor(ranks) as threads:
        made = list(threads.map(forward, range(ranks)))
        assert set(_Posted.sent) == {(step, dtype) for step in range(ranks - 1)}
        _Posted.sent.clear()
        found = list(
            threads.map(lambda rank: torch.autograd.grad(made[rank][0], made[rank][1], parts[3][rank]), range(ranks))
        )
    # Keys and values go on as they are, one step ahead of the sums of their gradients.
    assert set(_Posted.sent) == {
        *((2 * step, dtype) for step in range(ranks - 1)),
        *((2 * step + 1, torch.float32) for step in range(ranks)),
    }
    assert merged == {torch.float32}
    results = [_in_order(torch.stack([out.detach() for out, _ in made]))]
    results += [_in_order(torch.stack(gradients)) for gradients in zip(*found, strict=True)]
    tolerance = 2e-6 if dtype == torch.float32 else 3e-2
    for got, known in zip(results, (expected.detach(), *wanted), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), known, rtol=tolerance, atol=tolerance)


def test_messages_of_the_ring_stay_in_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are ranks of the group; what is received is there when somebody has waited."""
    given: list[Any] = []
    works = [SimpleNamespace(wait=lambda name=name: given.append(name)) for name in ("sent", "received")]
    monkeypatch.setattr(context_parallel, "P2POp", lambda *one, **named: (*one, named))
    monkeypatch.setattr(context_parallel, "batch_isend_irecv", lambda operations: given.extend(operations) or works)
    group, tensor = _group(1, 4), torch.ones(3)
    exchange = context_parallel._Exchange(tensor, group, 6)
    (send, sent, to), (receive, received, source) = given
    assert (send, receive, sent is tensor) == (context_parallel.isend, context_parallel.irecv, True)
    assert (to, source) == (
        {"group": group, "group_peer": 2, "tag": 6},
        {"group": group, "group_peer": 0, "tag": 6},
    )
    assert received is not tensor
    assert exchange.wait() is received
    assert given[2:] == ["sent", "received"]
