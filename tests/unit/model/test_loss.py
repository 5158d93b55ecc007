"""Losses of tokens by themselves: sums and counts of a microbatch, and a vocabulary that two ranks share."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.model import loss
from megatron_ext.model.gpt import GPT
from megatron_ext.model.loss import TokenLogits, summed_loss, token_loss


def test_only_what_the_mask_has_counts() -> None:
    """The sum to differentiate, the number of tokens, and both for the log, without a graph."""
    losses = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
    total, tokens, report = token_loss(mask, losses)
    assert (total.item(), int(tokens), tokens.dtype) == (21.0, 3, torch.int)
    assert report["lm loss"].tolist() == [21.0, 3.0]
    assert not report["lm loss"].requires_grad
    total.backward()
    assert losses.grad is not None
    assert torch.equal(losses.grad, mask)
    summed = torch.tensor(7.0, requires_grad=True)
    found, tokens, report = summed_loss(mask, summed)
    assert found is summed
    assert (int(tokens), report["lm loss"].tolist()) == (3, [7.0, 3.0])


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_share_a_vocabulary(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank adds to the other's: 5 of 10 entries each, large logits on either side."""
    generator = torch.Generator().manual_seed(0)
    logits = 20.0 * torch.randn(4, 3, 10, generator=generator)
    labels = torch.randint(0, 10, (3, 4), generator=generator)
    labels[0] = torch.tensor([0, 4, 5, 9])
    own, others = logits.chunk(2, dim=-1)[rank], logits.chunk(2, dim=-1)[1 - rank]
    others_normalizer = others.logsumexp(-1)
    highest = torch.maximum(own.logsumexp(-1), others_normalizer)
    here = labels.t() // 5 == 1 - rank
    picked = torch.where(here, others.gather(-1, (labels.t() % 5)[..., None])[..., 0], 0.0)
    answers = iter([(others_normalizer - highest).exp(), picked])  # in the order of the calls below
    asked: list[Any] = []

    def maximum(values: torch.Tensor, op: Any, group: Any) -> None:
        asked.append((op, group.rank()))
        values.copy_(torch.maximum(values, others_normalizer))

    def add(values: torch.Tensor, group: Any) -> torch.Tensor:
        return values + next(answers)

    monkeypatch.setattr(torch.distributed, "all_reduce", maximum)
    monkeypatch.setattr(loss, "reduce_from_tensor_model_parallel_region", add)
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: rank)
    mine = own.clone().requires_grad_()
    given = TokenLogits(mine, labels, group)
    normalizer, of_labels = given.log_normalizer(), given.of_labels()
    assert asked == [(torch.distributed.ReduceOp.MAX, rank)]
    torch.testing.assert_close(normalizer, logits.logsumexp(-1).t(), rtol=1e-6, atol=0)
    assert torch.equal(of_labels, logits.gather(-1, labels.t()[..., None])[..., 0].t())
    (normalizer - of_labels).sum().backward()
    whole = logits.clone().requires_grad_()
    F.cross_entropy(whole.flatten(0, 1), labels.t().flatten(), reduction="sum").backward()
    assert whole.grad is not None
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad, whole.grad.chunk(2, dim=-1)[rank], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("tensor", "reads", "divided"), [(1, True, False), (2, True, True), (1, False, True)])
def test_a_divided_vocabulary_has_the_engines_loss(tensor: int, reads: bool, divided: bool) -> None:
    """However many data-parallel ranks there are; and where the weight is not at hand."""
    logits, labels = torch.randn(4, 3, 10, generator=torch.Generator().manual_seed(0)), torch.zeros(3, 4).long()
    groups = {"tp": SimpleNamespace(size=lambda: tensor), "dp": SimpleNamespace(size=lambda: 3 - tensor)}
    gpt: Any = SimpleNamespace(
        own_loss=None,
        reads_output_weight=reads,
        pg_collection=SimpleNamespace(**groups),
        config=SimpleNamespace(gradient_accumulation_fusion=True),
        before_output=None,
        compute_language_model_loss=lambda labels, logits: "the engine's",
    )
    found = GPT._loss(gpt, torch.zeros(4, 3, 2), lambda hidden, weight: (logits, None), None, labels)  # pyright: ignore
    if divided:
        assert found == "the engine's"
    else:
        torch.testing.assert_close(found, -logits.log_softmax(-1)[..., 0].t())
