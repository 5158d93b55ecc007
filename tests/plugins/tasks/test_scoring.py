"""Scores that a model gives are those of a plain loop over a model that is a table."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.plugins.tasks import scoring
from megatron_ext.plugins.tasks.scoring import Scorable, Score, _batch, _batches, score
from tests.support.scripted_model import LETTERS, logits_of, scripted_model


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_scores_are_those_of_a_plain_loop() -> None:
    """Sequences of all lengths, of which one token or more are scored."""
    letters, drawn = torch.tensor(LETTERS), torch.Generator().manual_seed(7)
    sequences = [
        Scorable(letters[torch.randint(6, (length,), generator=drawn)].tolist(), scored)
        for length, scored in ((2, 1), (5, 4), (9, 2), (3, 1), (12, 11), (9, 8), (2, 1))
    ]
    for begun in sequences[:3]:  # those that the model finds likeliest, too
        tokens = list(begun.tokens[:1])
        while len(tokens) < 6:
            tokens.append(int(logits_of(tokens[-1], len(tokens) - 1)[:257].argmax()))
        sequences.append(Scorable(tokens, 3))
    expected = []
    for one in sequences:
        nats, greedy = 0.0, True
        for place in range(len(one.tokens) - one.scored, len(one.tokens)):
            logits = logits_of(one.tokens[place - 1], place - 1)[:257]
            nats += float(logits.log_softmax(-1)[one.tokens[place]])
            greedy = greedy and int(logits.argmax()) == one.tokens[place]
        expected.append((pytest.approx(nats, rel=1e-6), greedy))
    assert {greedy for _, greedy in expected} == {False, True}
    for rows in (1, 2, 3, 16):
        found = score(scripted_model(), sequences, rows)
        assert [(one.log_likelihood, one.greedy) for one in found] == expected
    assert score(scripted_model(), [], 2) == []


def test_a_batch_says_which_position_predicts_which_token() -> None:
    """Position s of row b is number s x B + b; the last token is predicted by the one before it, and is no input."""
    sequences = [Scorable([1, 2, 3], 1), Scorable([4, 5, 6, 7, 8], 2)]
    found = _batch(sequences, [1, 0], 2, 4, 5, torch.device("cpu"))
    assert found.tokens_BS.tolist() == [[4, 5, 6, 7], [1, 2, 0, 0]]
    assert found.wanted_N.tolist() == [2 * 2, 3 * 2, 1 * 2 + 1, 0, 0]
    assert found.targets_N.tolist() == [7, 8, 3, 0, 0]
    assert found.owners_N.tolist() == [1, 1, 0, -1, -1]


@pytest.mark.parametrize(("count", "rows", "replicas"), [(1, 4, 1), (7, 2, 3), (13, 4, 2), (5, 1, 4), (24, 3, 2)])
def test_batches_hold_each_sequence_once_in_equal_shapes(count: int, rows: int, replicas: int) -> None:
    sequences = [Scorable(list(range(3 + 3 * (number % 5))), 1 + number % 2) for number in range(count)]
    dealt = [list(_batches(sequences, rows, replica, replicas, torch.device("cpu"))) for replica in range(replicas)]
    members = [number for batches in dealt for batch in batches for number in batch.members]
    assert sorted(members) == list(range(count))
    for same_round in zip(*dealt, strict=True):
        assert len({(batch.tokens_BS.shape, batch.wanted_N.shape) for batch in same_round}) == 1
    for batch in (batch for batches in dealt for batch in batches):
        for place, target, owner in zip(batch.wanted_N, batch.targets_N, batch.owners_N, strict=True):
            if owner >= 0:
                row = batch.members.index(int(owner))
                position, same_row = divmod(int(place), len(batch.tokens_BS))
                assert same_row == row
                assert sequences[int(owner)].tokens[position + 1] == int(target)


def _group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


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
        rank=rank,
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
