"""Experts in few bits: every group of rows is a dense layer of its own, whatever else the rank multiplies."""

import pytest
import torch

from megatron_ext.config.resolve import Facts
from megatron_ext.plugins.low_precision.experts import Groups, linear_by_group
from megatron_ext.plugins.low_precision.formats import E5M2, RECIPES, recipe
from megatron_ext.plugins.low_precision.linear import Multiplication, linear
from megatron_ext.plugins.low_precision.random_numbers import Draw, Places
from megatron_ext.plugins.low_precision.rules import RULES
from tests.support.small_models import small_config

EXPERTS, INPUTS, OUTPUTS = 3, 256, 128
ROWS = [[130, 0, 17], [40, 32, 0]]
"""Rows that two microbatches have for each expert."""


def settings(name: str) -> list[Multiplication]:
    return [Multiplication(recipe(name, E5M2), draw=Draw(1, f"experts.{expert}")) for expert in range(EXPERTS)]


def made(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * torch.exp2(torch.randint(-4, 5, (*shape[:-1], 1), generator=generator).float())


def passes(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, groups: Groups, name: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = linear_by_group(x, weight, groups, settings(name))
    y.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    return y.detach(), x.grad, weight.grad


def by_sender(rows: list[list[int]]) -> list[list[torch.Tensor]]:
    """Indices of each sender's rows by expert, among rows that are sorted by expert and then by sender."""
    found: list[list[torch.Tensor]] = [[] for _ in rows]
    begin = 0
    for counts in zip(*rows, strict=True):
        for sender, count in zip(found, counts, strict=True):
            sender.append(torch.arange(begin, begin + count))
            begin += count
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_two_microbatches_are_multiplied_as_each_alone(name: str) -> None:
    """What one rank computes with expert parallelism two compute without: the same numbers, and gradients that add up;
    and an expert is a dense layer whose tokens are padded with zeros."""
    total = sum(map(sum, ROWS))
    x, grad, weight = made(total, INPUTS, seed=1), made(total, OUTPUTS, seed=2), made(EXPERTS, OUTPUTS, INPUTS, seed=3)
    together = passes(x, weight, grad, Groups.of(ROWS, [(0, 0), (1, 0)], x.device), name)
    sums = torch.zeros_like(weight)
    for sender, indices in enumerate(by_sender(ROWS)):
        own = torch.cat(indices)
        groups = Groups.of([ROWS[sender]], [(sender, 0)], x.device)
        y, for_x, for_weight = passes(x[own], weight, grad[own], groups, name)
        assert torch.equal(together[0][own], y)
        assert torch.equal(together[1][own], for_x)
        sums += for_weight
        for expert, rows in enumerate(indices):
            if not len(rows):
                continue
            pad = torch.nn.functional.pad
            parts = [pad(part[rows], (0, 0, 0, -len(rows) % 128)).unsqueeze(1) for part in (x, grad)]
            x_of, matrix = parts[0].requires_grad_(), weight[expert].clone().requires_grad_()
            dense = linear(x_of, matrix, settings(name)[expert])
            dense.backward(parts[1])
            assert x_of.grad is not None
            # The processor's library adds in another order for another number of rows.
            near = dense.detach().abs().max() * 1e-6
            assert (dense.detach()[: len(rows), 0] - together[0][rows]).abs().max() <= near
            assert (x_of.grad[: len(rows), 0] - together[1][rows]).abs().max() <= x_of.grad.abs().max() * 1e-6
    assert (sums - together[2]).abs().max() <= 1e-6 * sums.abs().max()
    assert not sums[1].eq(0).all()


@pytest.mark.parametrize("name", RECIPES)
def test_a_scale_for_rows_of_two_microbatches_is_noticed(name: str) -> None:
    """The planted fault: all rows of an expert as one group. One microbatch has no gradient, but large numbers."""
    total = sum(map(sum, ROWS))
    x, grad, weight = made(total, INPUTS, seed=1), made(total, OUTPUTS, seed=2), made(EXPERTS, OUTPUTS, INPUTS, seed=3)
    large, small = (torch.cat(indices) for indices in by_sender(ROWS))
    grad[large], x[small] = 0.0, x[small] * 2.0**-16
    right = passes(x, weight, grad, Groups.of(ROWS, [(0, 0), (1, 0)], x.device), name)
    wrong = passes(x, weight, grad, Groups.of(ROWS, [(0, 0), (0, 1)], x.device), name)
    assert (right[2] - wrong[2]).abs().max() > 1e-4 * right[2].abs().max()


def test_rows_of_a_microbatch_are_put_in_the_order_of_its_tokens() -> None:
    """Two ranks of tensor parallelism whose rows come in the other order, of two microbatches."""
    rows = [[1, 2], [2, 0], [1, 1], [1, 3]]
    groups = Groups.of(rows, [(0, 0, 1), (1, 0, 0), (0, 0, 0), (1, 0, 1)], torch.device("cpu"))
    assert groups.experts == [0, 0, 1, 1]
    assert [index.tolist() for index in groups.rows] == [[3, 0], [1, 2, 4], [7, 5, 6], [8, 9, 10]]


def test_a_divided_expert_draws_its_own_columns() -> None:
    """Of a gated matrix a rank has a part of the gate and a part of the up projection."""
    grad = torch.empty(147, 256)
    whole = Draw(1, "experts.0").uniform(grad)
    for part in (0, 1):
        columns = torch.cat([torch.arange(64) + 64 * part, torch.arange(64) + 128 + 64 * part])
        own = Draw(1, "experts.0", columns=Places(part, 2, 2)).uniform(grad[:, columns])
        assert torch.equal(own, whole[:, columns])
        assert not torch.equal(Draw(1, "experts.0").uniform(grad[:, columns]), whole[:, columns]), "as if it had all"


EXPERTS_OF = {"num_experts": 4, "moe_ffn_hidden_size": 128, "disable_bias_linear": True, "hidden_size": 128}


@pytest.mark.parametrize(
    ("layout", "training", "words"),
    [
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, {}, None),
        (
            {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1},
            {},
            "divide over 2 ranks, and --expert-model-parallel-size 1 with --expert-tensor-parallel-size 1 brings 1 "
            "together; use --expert-tensor-parallel-size 2, or leave --fp8-format out",
        ),
        (
            {
                **{"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 1},
                "expert_model_parallel_size": 2,
            },
            {},
            None,
        ),
        (
            {"context_parallel_size": 2, "expert_model_parallel_size": 2},
            {"fp8_recipe": "mxfp8", "micro_batch_size": 8},
            "rounds blocks of an expert's tokens in their order",
        ),
        ({"context_parallel_size": 2, "expert_model_parallel_size": 2}, {"fp8_recipe": "rowwise"}, None),
    ],
)
def test_experts_see_whole_microbatches_or_are_refused(layout: dict, training: dict, words: str | None) -> None:
    training = {"fp8_format": "hybrid", "micro_batch_size": 2, **training}
    config = small_config(EXPERTS_OF, layout={"world_size": 2, **layout}, training=training)
    found = [text for rule in RULES for text in rule(config, Facts())]
    assert len(found) == (words is not None), found
    assert words is None or words in found[0]
