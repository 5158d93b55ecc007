"""Scores where ranks divide the vocabulary: which token is the likeliest, and who counts."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.inference import scoring
from megatron_ext.inference.scoring import Scorable, Score, score


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
