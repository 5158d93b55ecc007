"""Our core attention against attention written out in fp64."""

import math
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnMaskType

from megatron_ext.model.config import transformer_config
from megatron_ext.parallel import groups as groups_of_ranks
from megatron_ext.parts.attention.compute import SDPAttention
from megatron_ext.parts.attention.describe import FEW_KEYS, KEPT_ROWS, Softmax
from tests.support.small_models import LLAMA, build_small_model, small_config


def _attention(dropout: float = 0.0, scale: float | None = None, window: int | None = None) -> SDPAttention:
    config = transformer_config(small_config({"attention_dropout": dropout}), "cpu")
    return SDPAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=scale, window=window)


def _written_out(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """Heads [batch, heads, sequence, channels] to a context of [sequence, batch, heads x channels]."""
    repeats = query.size(1) // key.size(1)
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.einsum("bhsd,bhtd->bhst", query, key) * scale
    future = torch.ones(query.size(2), key.size(2), dtype=torch.bool).triu(1)
    past = torch.zeros_like(future) if window is None else torch.ones_like(future).tril(-window)
    weights = scores.masked_fill(future | past, -torch.inf).softmax(-1)
    return torch.einsum("bhst,bhtd->sbhd", weights, value).flatten(2)


def _roundings(got: torch.Tensor, exact: torch.Tensor) -> float:
    """How far numbers are from the exact ones, as roots of mean squares, in units of one rounding of each to bf16.

    That changes a number by half a unit of its last place, 2^-8, at most, and by 0.42 of that as the root of the mean
    square over all numbers of 8 bits.
    """
    return float((got.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()) * 2**8 / 0.42


@pytest.mark.parametrize(
    ("sequence", "dtype"),
    [
        (33, torch.float32),
        (2 * KEPT_ROWS + 1, torch.float32),
        (FEW_KEYS + 1, torch.float32),
        (33, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("groups", [1, 2, 3, 6])  # 3: as many as samples
@pytest.mark.parametrize(("scale", "values"), [(None, 16), (0.5, 16), (None, 24)])
def test_equals_attention_written_out(
    sequence: int, groups: int, scale: float | None, values: int, dtype: torch.dtype
) -> None:
    """In fp32 within 2e-6. In bf16 four roundings of the context, half of them at random: of the probabilities, their
    product, and it; in the gradients twelve, for those of the probabilities and scores come on top."""
    torch.manual_seed(0)
    batch, heads, channels = 3, 6, 16
    shapes = [(batch, heads, sequence, channels), *((batch, groups, sequence, size) for size in (channels, values))]
    ours = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    weight = torch.randn(sequence, batch, heads * values, dtype=dtype)

    context = _attention(scale=scale)(*ours)
    expected = _written_out(*exact, scale=scale or 1.0 / math.sqrt(channels))

    assert context.shape == (sequence, batch, heads * values)
    assert context.is_contiguous()
    pairs = [
        (context.detach(), expected.detach()),
        *zip(
            torch.autograd.grad((context * weight).sum(), ours),
            torch.autograd.grad((expected * weight.double()).sum(), exact),
            strict=True,
        ),
    ]
    for got, wanted in pairs:
        assert got.dtype == dtype
        if dtype == torch.bfloat16:
            assert _roundings(got, wanted) < (4 if wanted is pairs[0][1] else 12) ** 0.5
        else:
            torch.testing.assert_close(
                got.double(), wanted, atol=2e-6 * (1 if wanted is pairs[0][1] else 10), rtol=2e-6
            )


@pytest.mark.parametrize("window", [1, 70, KEPT_ROWS, 1000])
@pytest.mark.parametrize("sequence", [33, 3 * KEPT_ROWS + 1, FEW_KEYS + 1])
def test_a_window_equals_attention_written_out(sequence: int, window: int) -> None:
    """In sequences whose weights are kept, in those that are long and whose windows have few keys, and in those that
    are neither."""
    torch.manual_seed(0)
    ours = [torch.randn(2, heads, sequence, 16, requires_grad=True) for heads in (4, 2, 2)]
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    weight = torch.randn(sequence, 2, 64)
    context = _attention(window=window)(*ours)
    expected = _written_out(*exact, scale=0.25, window=window)
    gradients = torch.autograd.grad((context * weight).sum(), ours)
    exact_gradients = torch.autograd.grad((expected * weight.double()).sum(), exact)
    for got, wanted in zip((context, *gradients), (expected, *exact_gradients), strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=2e-5, rtol=2e-6)


@pytest.mark.parametrize("window", [None, 70])
def test_traced_attention_is_the_same(window: int | None) -> None:
    """The compiler is given other operations, which are run here as it traces them, in one graph."""
    torch.manual_seed(0)
    heads = [torch.randn(2, number, 2 * KEPT_ROWS + 1, 16, requires_grad=True) for number in (4, 2, 2)]
    attention = _attention(window=window)
    traced: Any = torch.compile(attention, backend="eager", fullgraph=True)
    contexts = [attention(*heads), traced(*heads)]
    weight = torch.randn_like(contexts[0])
    gradients = [torch.autograd.grad((one * weight).sum(), heads) for one in contexts]
    for ours, wanted in zip((contexts[1], *gradients[1]), (contexts[0], *gradients[0]), strict=True):
        torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=2e-6)


def test_as_many_samples_as_heads_share_keys() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(6, heads, 9, 16) for heads in (6, 2, 2))
    expected = _written_out(query.double(), key.double(), value.double(), 0.25)
    torch.testing.assert_close(_attention()(query, key, value).double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("last", [5, KEPT_ROWS + 5])
def test_no_token_sees_the_future(last: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, last + 3, 16) for _ in range(3))
    attention = _attention()
    before = attention(query, key, value)
    key[:, :, last:], value[:, :, last:] = torch.randn(2, 1, 2, 3, 16) * 100.0
    assert torch.equal(attention(query, key, value)[:last], before[:last])


def test_dropout_draws_from_the_tensor_parallel_generator_and_only_in_training() -> None:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    assert tracker is not None
    tracker.reset()
    tracker.add("model-parallel-rng", 7)
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 8, 16) for _ in range(3)]
    attention = _attention(dropout=0.5)
    default_state = torch.get_rng_state()

    first, second = attention(*tensors), attention(*tensors)
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), default_state)
    tracker.reset()
    tracker.add("model-parallel-rng", 7)
    assert torch.equal(attention(*tensors), first)

    attention.eval()
    assert torch.equal(attention(*tensors), attention(*tensors))


def test_dropout_of_slopes_leaves_weights_out_and_divides_the_others() -> None:
    """Each channel of the values is a token's own, so that the context shows the weights."""
    tracker = tensor_parallel.get_cuda_rng_tracker()
    assert tracker is not None
    tracker.reset()
    tracker.add("model-parallel-rng", 7)
    config = transformer_config(small_config({"attention_dropout": 0.25, "position_embedding_type": "alibi"}), "cpu")
    attention = SDPAttention(config, 1, AttnMaskType.causal, "self", softmax=Softmax(has_slopes=True))
    query, key = torch.randn(2, 8, config.num_attention_heads, 64, 64, generator=torch.Generator().manual_seed(1))
    value = torch.eye(64).expand_as(key)
    trained = attention(query, key, value)
    whole = attention.eval()(query, key, value)
    kept = trained != 0
    torch.testing.assert_close(trained[kept], whole[kept] / 0.75)
    assert kept.sum() / (whole != 0).sum() == pytest.approx(0.75, abs=0.01)


def test_a_gate_of_heads_multiplies_all_channels_of_each() -> None:
    """Attention with its projections against the same written out from the sections of the fused matrix, in fp64."""
    changes = {"num_layers": 1, "attention_output_gate": True, "attention_output_gate_over": "head"}
    [gpt], _ = build_small_model(small_config({**LLAMA, **changes}))
    attention: Any = gpt.decoder.layers[0].self_attention.double()
    described, hidden = attention.described, attention.config.hidden_size
    heads, groups = described.query_heads, described.groups
    x = torch.randn(9, 2, hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = attention.linear_qkv.weight.view(groups, -1, hidden).split(described.sections, dim=1)
    query, gate, key, value = ((x @ part.reshape(-1, hidden).mT).view(9, 2, groups, -1) for part in rows)
    of_heads = (one.reshape(9, 2, count, -1).permute(1, 2, 0, 3) for one, count in ((query, heads), (key, groups)))
    context = _written_out(*of_heads, value.permute(1, 2, 0, 3), scale=described.head_size**-0.5)  # pyright: ignore
    gated = context.view(9, 2, heads, -1) * gate.reshape(9, 2, heads, 1).sigmoid()
    found, _ = attention(x)
    torch.testing.assert_close(found, attention.linear_proj(gated.flatten(2))[0], atol=1e-6, rtol=0)
    assert rows[1].numel() == heads * hidden
    groups_of_ranks.destroy()
