"""Parts of which tensor-parallel ranks hold shares: a layer that keeps what it gathers, a norm over all heads, a padded
vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.model.config import transformer_config
from megatron_ext.model.names import global_named_parameters
from megatron_ext.parts.linear.compute import _GatheredLinear
from megatron_ext.parts.norm.compute import ProjectionNorm
from tests.support.several_models import in_turn
from tests.support.small_models import LLAMA, build_small_model, small_config


def _compare() -> list[tuple[bool, list[bool], tuple[int, int]]]:
    """Return of products with and without a bias: whether the outputs are equal, whether each gradient is, and how
    many gathers the backward pass of each made."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    group: Any = parallel_state.get_tensor_model_parallel_group()
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for biased in (False, True):
        x, weight, bias = (
            torch.randn(shape, generator=generator, requires_grad=True) for shape in ((6, 3, 16), (24, 16), (24,))
        )
        given = [x, weight, *([bias] if biased else [])]
        grad = torch.randn(12, 3, 24, generator=generator)
        kept: Any = _GatheredLinear.apply(x, weight, bias if biased else None, group)
        settings = (False, False, True, None, None, group, 1)
        theirs: Any = LinearWithGradAccumulationAndAsyncCommunication.apply(
            x, weight, bias if biased else None, *settings
        )
        ours, gathers = _gradients(kept, given, grad)
        expected, of_theirs = _gradients(theirs, given, grad)
        equal = [torch.equal(one, other) for one, other in zip(ours, expected, strict=True)]
        found.append((torch.equal(kept, theirs), equal, (gathers, of_theirs)))
    return found


def _gradients(output: torch.Tensor, inputs: list[torch.Tensor], grad: torch.Tensor) -> tuple[Any, int]:
    """Return the gradients, and the number of gathers that it took to make them."""
    with torch.profiler.profile() as profile:
        gradients = torch.autograd.grad(output, inputs, grad)
    return gradients, sum(event.name == "c10d::_allgather_base_" for event in profile.events() or ())


def test_the_bits_are_those_of_gathering_again() -> None:
    for of_rank in run_ranks(2, _compare):
        assert of_rank == [(True, [True] * count, (0, 1)) for count in (2, 3)]


RANKS, SHAPE, CHANNELS, EPSILON = 4, (5, 3), 6, 1e-3
ROUNDED = 2.0**-8 * 1.01  # bf16 has 8 bits; and what fp32 has rounded before


@dataclass
class Normalized:
    """What one rank has: its heads' result, and the gradients of its heads and of all weights."""

    result: torch.Tensor
    for_x: torch.Tensor
    for_weight: torch.Tensor


def _whole(heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Heads of all ranks, weights, and the gradient of each rank's own result."""
    torch.manual_seed(0)
    x = (3.0 * torch.randn(*SHAPE, heads, CHANNELS) + 1.0).to(dtype)
    held = max(heads // RANKS, 1)
    return x, torch.randn(heads * CHANNELS).to(dtype), torch.randn(RANKS, *SHAPE, held, CHANNELS).to(dtype)


def _own(rank: int, heads: int) -> slice:
    """The heads of a rank; with fewer heads than ranks, consecutive ranks have the same one."""
    held = max(heads // RANKS, 1)
    return slice(rank * heads // RANKS, rank * heads // RANKS + held)


def _on_a_rank(heads: int, bf16: bool) -> Normalized:
    torch.distributed.init_process_group("gloo")
    group, rank = torch.distributed.group.WORLD, torch.distributed.get_rank()
    assert group is not None
    config = transformer_config(small_config(training={"bf16": bf16}), "cpu")
    norm = ProjectionNorm(config, CHANNELS, EPSILON, heads=heads, tp_group=group)
    x, weight, gradients = _whole(heads, config.params_dtype)
    norm.weight.data.copy_(weight)
    held = x[:, :, _own(rank, heads)].contiguous().requires_grad_()
    result = norm(held)
    result.backward(gradients[rank])
    assert held.grad is not None
    assert norm.weight.grad is not None
    return Normalized(result.detach(), held.grad, norm.weight.grad)


def _assert_close(got: torch.Tensor, exact: torch.Tensor, sizes: torch.Tensor, bf16: bool) -> None:
    """In bf16 each number that a rank gives is rounded once; `sizes` are the sums of their absolute values."""
    if bf16:
        assert ((got - exact).abs() <= sizes * ROUNDED + 1e-5).all()
    else:
        torch.testing.assert_close(got, exact, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("heads", [8, 2])
def test_equals_its_formula_on_the_heads_of_all_ranks(heads: int, bf16: bool) -> None:
    found = run_ranks(RANKS, _on_a_rank, heads, bf16)
    x, weight, gradients = (tensor.double() for tensor in _whole(heads, found[0].result.dtype))
    x.requires_grad_()
    weight.requires_grad_()
    mean = x.square().mean((-1, -2), keepdim=True)
    result = x / (mean + EPSILON).sqrt() * weight.view(heads, CHANNELS)
    parts = [result[:, :, _own(rank, heads)] for rank in range(RANKS)]
    torch.autograd.backward(parts, list(gradients))
    assert x.grad is not None

    for_x, sizes = torch.zeros_like(x), torch.zeros_like(x)
    for rank, (one, part) in enumerate(zip(found, parts, strict=True)):
        _assert_close(one.result.double(), part, part.abs(), bf16)
        for_x[:, :, _own(rank, heads)] += one.for_x.double()
        sizes[:, :, _own(rank, heads)] += one.for_x.double().abs()
    _assert_close(for_x, x.grad, sizes, bf16)
    assert weight.grad is not None
    of_ranks = torch.stack([one.for_weight.double() for one in found])
    _assert_close(of_ranks.sum(0) / 10, weight.grad / 10, of_ranks.abs().sum(0) / 10, bf16)


VOCAB_SIZE = 250
UNTIED = (False, True)


Found = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Losses, or their sum, and gradients by name."""


def _losses_and_sum(config) -> list[Found]:
    """Of the loss of each token, and of their sum in one with the output layer (--linear-cross-entropy)."""
    [gpt], _ = build_small_model(config)
    tokens = torch.randint(0, VOCAB_SIZE, (2, 17), generator=torch.Generator().manual_seed(0))
    given = tokens[:, :-1], torch.arange(16).expand(2, 16), None
    found: list[Found] = []
    for mask in (None, torch.ones(2, 16)):
        losses = gpt(*given, labels=tokens[:, 1:], loss_mask=mask)
        losses.sum().backward()
        found.append((losses.detach(), {name: tensor.grad for name, tensor in global_named_parameters([gpt])}))  # pyright: ignore
        gpt.zero_grad(set_to_none=True)
    return found


def _results(padded: int, tp: int) -> list[list[list[Found]]]:
    """By rank: of a model with tied, and of one with untied embeddings."""
    layout = {"tensor_model_parallel_size": tp, "world_size": tp}
    sizes = {"num_layers": 1, "padded_vocab_size": padded}
    models = [{**LLAMA, **sizes, "untie_embeddings_and_output_weights": untied} for untied in UNTIED]
    configs = [small_config(model, layout, vocab_size=VOCAB_SIZE) for model in models]
    return run_ranks(tp, in_turn, _losses_and_sum, configs)


@pytest.fixture(scope="module")
def unpadded() -> list[list[Found]]:
    return _results(VOCAB_SIZE, tp=1)[0]


@pytest.mark.parametrize(("padded", "tp"), [(256, 1), (512, 1), (512, 2), (512, 4)])
def test_loss_and_gradients_are_those_without_padding(padded: int, tp: int, unpadded: Any) -> None:
    """At 512 over 4 ranks, two ranks hold nothing but padding."""
    by_rank = _results(padded, tp)
    for number, untied in enumerate(UNTIED):
        for way, exact in enumerate(unpadded[number]):
            _assert_equal(exact, [rank[number][way] for rank in by_rank], untied)


def _assert_equal(exact: Any, results: list[Found], untied: bool) -> None:
    expected, gradients = exact
    for losses, _ in results:
        torch.testing.assert_close(losses, expected, rtol=3e-7, atol=0)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight")[: 1 + untied]:
        got = torch.cat([shards[name] for _, shards in results])
        assert torch.count_nonzero(got[VOCAB_SIZE:]) == 0
        # What any two layouts promise: within 1e-5 of the gradient's norm.
        assert (got[:VOCAB_SIZE] - gradients[name]).norm() < 1e-5 * gradients[name].norm()
