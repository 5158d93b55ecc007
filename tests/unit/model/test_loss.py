"""Losses of tokens by themselves: sums and counts of a microbatch, and a vocabulary that two ranks share."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear

from megatron_ext.model import loss
from megatron_ext.model.gpt import GPT
from megatron_ext.model.loss import Readout, TokenLogits, summed_loss, token_loss
from megatron_ext.parts.attention.cached import WholeSequences
from tests.support.small_models import build_small_model, small_config


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


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest) -> GPT:
    """250 entries of a vocabulary, and 6 rows of padding that are not zero."""
    [made], _ = build_small_model(small_config({"untie_embeddings_and_output_weights": not request.param}))
    _weight(made).data.normal_(generator=torch.Generator().manual_seed(2))
    return made


def _weight(model: GPT) -> Any:
    tied = model.share_embeddings_and_output_weights
    return model.shared_embedding_or_output_weight() if tied else model.output_layer.weight


@pytest.mark.parametrize("keeps", [True, False])
def test_padding_takes_no_probability(model: GPT, keeps: bool) -> None:
    """Whether the weight is read itself, or logits are asked of the layer: losses, their sum, logits, and gradients."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 2, 64, generator=generator, requires_grad=True)
    labels = torch.randint(250, (2, 5), generator=generator)
    mask = torch.randint(2, (2, 5), generator=generator).float()
    weight = _weight(model)
    logits = hidden @ weight[:250].t()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none").view(5, 2).t()
    wanted = torch.autograd.grad((expected * mask).sum(), (hidden, weight))
    readout = Readout(model.config, model.pg_collection.tp, 250, None, keeps)
    given: Any = {"hidden_states": hidden, "output_layer": model.output_layer, "labels": labels}
    given["output_weight"] = weight if model.share_embeddings_and_output_weights else None
    found = readout(**given)
    torch.testing.assert_close(found, expected)
    sums = [(found * mask).sum()] + ([readout(**given, loss_mask=mask)] if keeps else [])
    for total in sums:
        torch.testing.assert_close(total, (expected * mask).sum())
        for one, other in zip(torch.autograd.grad(total, (hidden, weight)), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    read = torch.tensor([3, 0, 9])
    of_read = readout(**given, packed_seq_params=WholeSequences(read))
    torch.testing.assert_close(of_read[:, :250], logits.flatten(0, 1)[read])
    assert of_read.size(1) == (250 if keeps else 256)
    assert (of_read[:, 250:] == torch.finfo(torch.float32).min).all()


def test_the_square_of_the_log_of_the_normalizer_is_added(model: GPT) -> None:
    """As the sum of autograd's operations over the true vocabulary: losses and gradients."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 2, 64, generator=generator, requires_grad=True)
    labels = torch.randint(250, (2, 5), generator=generator)
    weight = _weight(model)
    logits = hidden @ weight[:250].t()
    expected = F.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none").view(5, 2).t()
    expected = expected + 0.25 * logits.logsumexp(-1).t().square()
    wanted = torch.autograd.grad(expected.sum(), (hidden, weight))
    readout = Readout(model.config, model.pg_collection.tp, 250, z_loss=0.25)
    own = weight if model.share_embeddings_and_output_weights else None
    found = readout(hidden_states=hidden, output_layer=model.output_layer, output_weight=own, labels=labels)
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found.sum(), (hidden, weight)), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("vocabulary", "rank", "expected"), [(6, 0, 4), (6, 1, 2), (8, 1, 4), (4, 0, 4), (4, 1, 0), (3, 0, 3), (3, 1, 0)]
)
def test_each_rank_masks_its_rows_of_padding(vocabulary: int, rank: int, expected: int, model: GPT) -> None:
    """Of 8 rows on 2 ranks: those from the end of the vocabulary on, which may lie on any of them."""
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: 2)
    layer = ColumnParallelLinear(
        3, 8, config=model.config, init_method=torch.nn.init.zeros_, bias=False, gather_output=False, tp_group=group
    )
    Readout(model.config, group, vocabulary).prepare(layer)
    assert layer.weight is not None
    layer.weight.data.fill_(1.0)
    with torch.no_grad():
        logits, _ = layer(torch.ones(2, 1, 3))
    assert logits[0, 0].tolist() == [3.0] * expected + [torch.finfo(torch.float32).min] * (4 - expected)


def test_a_loss_of_ones_own_is_given_the_logits(model: GPT) -> None:
    weight = _weight(model) if model.share_embeddings_and_output_weights else None
    own = Readout(model.config, model.pg_collection.tp, 250, lambda token: 2.0 * token.cross_entropy())
    usual = Readout(model.config, model.pg_collection.tp, 250)
    hidden, labels = torch.randn(5, 2, 64, requires_grad=True), torch.zeros(2, 5, dtype=torch.int64)
    found, expected = (one(hidden, model.output_layer, weight, labels) for one in (own, usual))
    torch.testing.assert_close(found, 2.0 * expected)
