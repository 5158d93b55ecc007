"""Losses of tokens by themselves: sums and counts of a microbatch, and a vocabulary that two ranks share."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear

from megatron_ext.data.packing import restarted_positions
from megatron_ext.model import loss
from megatron_ext.model.config import transformer_config
from megatron_ext.model.gpt import GPT
from megatron_ext.model.loss import Readout, TokenLogits, summed_loss, token_loss
from megatron_ext.parts.attention.cached import WholeSequences
from megatron_ext.parts.experts.router import Router
from megatron_ext.parts.norm.compute import LayerNorm, RMSNorm, norm_class
from megatron_ext.plugins.optimizers.lion import Lion
from megatron_ext.plugins.tasks.scoring import _Scored
from tests.support.small_models import LLAMA, build_small_model, small_config


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


ROUNDED = 2.0**-8
FP32 = 2.0**-24
BF16 = {"bf16": True}
LONGEST = 131072
"""Positions of the longest contexts that models are trained on."""


def _model(**model: Any) -> Any:
    [gpt], _ = build_small_model(small_config({**LLAMA, **model}, training=BF16))
    return gpt


def test_the_loss_is_the_cross_entropy_of_the_same_logits_in_fp32() -> None:
    """A logarithm of a sum of 256 numbers: the sum is right within its terms' roundings, at most 256 of them, and a
    loss below 8 within one of 2^-24 of itself for each of its two terms."""
    gpt = _model(padded_vocab_size=250)
    tokens = torch.randint(0, 250, (2, 17), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(16).expand(2, 16)
    logits, losses = gpt(tokens[:, :-1], positions, None), gpt(tokens[:, :-1], positions, None, labels=tokens[:, 1:])
    assert (logits.dtype, losses.dtype) == (torch.bfloat16, torch.float32)
    exact = F.cross_entropy(logits.double().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").view(2, 16)
    assert 4.0 < exact.mean() < 8.0
    assert (losses - exact).abs().max() < (250 + 16) * FP32


ALONE: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


def _logits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits in bf16, [N, V], labels, and the log-probabilities of these in fp64."""
    generator = torch.Generator().manual_seed(0)
    logits = (3.0 * torch.randn(40, 250, generator=generator)).bfloat16()
    labels = torch.randint(0, 250, (40,), generator=generator)
    return logits, labels, logits.double().log_softmax(-1).gather(1, labels[:, None])[:, 0]


def test_a_loss_of_ones_own_is_given_what_is_right_in_fp32() -> None:
    """As above; the sum over 40 tokens is as many roundings off, of numbers below 16, however it is masked."""
    logits, labels, exact = _logits()
    losses = TokenLogits(logits[:, None], labels[None], ALONE).cross_entropy()
    assert (losses.shape, losses.dtype) == ((1, 40), torch.float32)
    assert (losses[0] + exact).abs().max() < (250 + 32) * FP32
    mask = (torch.arange(40) % 3 > 0).float()[None]
    total, tokens, report = token_loss(mask, losses.bfloat16())
    assert (total.dtype, int(tokens), report["lm loss"].dtype) == (torch.float32, 26, torch.float32)
    expected = (losses.bfloat16().double() * mask).sum()
    assert abs(float(total) - float(expected)) < 40 * float(expected) * FP32


def test_scores_are_log_probabilities_in_fp32() -> None:
    """Padding, which may have any logit, takes no probability, and is no most likely token."""
    logits, labels, exact = _logits()
    padded = torch.cat((logits, torch.full((40, 6), 100.0).bfloat16()), dim=1)
    labels[::2], exact[::2] = logits.argmax(1)[::2], logits.double().log_softmax(-1).amax(1)[::2]
    scored: Any = _Scored.__new__(_Scored)
    scored._model = SimpleNamespace(groups=SimpleNamespace(tp=ALONE), vocab_size=250)
    log_probability, is_best = scored._of(padded, labels).unbind(1)
    assert (log_probability - exact).abs().max() < (250 + 32) * FP32
    assert torch.equal(is_best, (logits.float().argmax(1) == labels).double())
    assert is_best.sum() >= 20


def test_rotary_angles_are_right_up_to_the_longest_position() -> None:
    """An angle is position x frequency in fp32, each rounded and their product: 4 x 2^-24 of it, the power in the
    frequency included; its cosine is then rounded to bf16."""
    gpt = _model(max_position_embeddings=LONGEST, rotary_base=500000)
    table = gpt.rotary_pos_emb.get_emb(LONGEST)
    exponents = torch.arange(0, 16, 2, dtype=torch.float64) / 16
    angles = torch.outer(torch.arange(LONGEST, dtype=torch.float64), 500000.0**-exponents)
    exact = torch.stack((angles.cos(), angles.sin()))
    assert (table.shape, table.dtype) == (exact.shape, torch.bfloat16)
    assert ((table.double() - exact).abs() <= ROUNDED + 4 * FP32 * angles).all()
    positions = torch.tensor([[0, 1, LONGEST - 1], [257, 32769, 65537]])
    assert torch.equal(gpt.rotary_pos_emb.at(positions), table[:, positions].unsqueeze(2))


def test_positions_of_packed_documents_are_right_up_to_the_longest() -> None:
    tokens = torch.ones(1, LONGEST, dtype=torch.int64)
    tokens[0, 4] = 0
    positions = restarted_positions(tokens, eod=0)
    assert torch.equal(positions[0], torch.cat([torch.arange(5), torch.arange(LONGEST - 5)]))


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_norms_round_their_result_once(kind: str) -> None:
    """Means and variances in 16 bits would change all numbers of a row by up to 2^-8 more."""
    torch.manual_seed(0)
    norm: RMSNorm | LayerNorm = norm_class(kind)(transformer_config(small_config(training=BF16), "cpu"), 512, eps=1e-3)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter.data)
    x = (3.0 * torch.randn(64, 512) + 1.0).bfloat16()
    centred = x.double() - (x.double().mean(-1, keepdim=True) if kind == "LayerNorm" else 0.0)
    exact = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    exact = exact + (norm.bias.double() if isinstance(norm, LayerNorm) else 0.0)
    error = (norm(x).double() - exact).abs()
    # fp32 before it: numbers of up to some 20, sums of 512 terms.
    assert (error <= ROUNDED * exact.abs() * 1.0001 + 20 * 32 * FP32).all()


@pytest.mark.parametrize(("dtype", "bits"), [("fp32", torch.float32), ("fp64", torch.float64), (None, torch.bfloat16)])
def test_routers_logits_have_the_precision_that_is_asked_for(dtype: str | None, bits: torch.dtype) -> None:
    """A sum of 64 products of numbers with 8 bits, each exact in fp32: 64 roundings of the sum of their sizes; in
    bf16 one rounding of the result more."""
    torch.manual_seed(0)
    config = transformer_config(small_config({"num_experts": 8, "moe_router_dtype": dtype}, training=BF16), "cpu")
    x, weight = torch.randn(50, 1, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    router: Any = Router.__new__(Router)
    torch.nn.Module.__init__(router)
    router.config, router.weight, router.bias = config, weight, None
    logits = router.gating(x)
    exact, sizes = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    assert logits.dtype == bits
    rounding = {torch.float32: 64 * FP32, torch.float64: 64 * 2.0**-53, torch.bfloat16: 64 * FP32}[bits] * sizes
    rounding = rounding + (ROUNDED * exact.abs() if bits is torch.bfloat16 else 0.0)
    assert ((logits.double() - exact).abs() <= rounding).all()


def test_lion_is_its_equation_in_fp64() -> None:
    """Weights of up to 4 after 20 updates: two roundings of 2^-24 in each, of the weight and of the step."""
    ours, exact = torch.linspace(-4, 4, 101), torch.linspace(-4, 4, 101).double()
    momentum, generator = torch.zeros(101, dtype=torch.float64), torch.Generator().manual_seed(0)
    optimizer = Lion([ours], lr=0.01, betas=(0.9, 0.99), weight_decay=0.1)
    for _ in range(20):
        ours.grad = torch.randn(101, generator=generator)
        optimizer.step()
        gradient = ours.grad.double()
        exact -= 0.01 * ((0.9 * momentum + 0.1 * gradient).sign() + 0.1 * exact)
        momentum = 0.99 * momentum + 0.01 * gradient
    assert (ours - exact).abs().max() <= 20 * 2 * 4 * FP32
    # An average of numbers below 4: two roundings in each update.
    assert (optimizer.state[ours]["exp_avg"] - momentum).abs().max() <= 20 * 2 * 4 * FP32
