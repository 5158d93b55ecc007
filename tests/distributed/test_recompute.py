"""Recomputing activations changes no bit, with dropout on, on one rank and under sequence parallelism."""

from typing import Any

import pytest
import torch

from megatron_ext.config.schema import Config
from megatron_ext.model.names import global_named_parameters
from megatron_ext.verify.ranks import run_ranks
from tests.support.several_models import in_turn
from tests.support.small_models import LLAMA, build_small_model, small_config

SMALL = {"num_layers": 3}
DROPOUT = {**SMALL, "attention_dropout": 0.1, "hidden_dropout": 0.1}
METHODS: dict[str, dict[str, Any]] = {
    "selective": {"recompute_granularity": "selective"},
    "mlp, layernorm": {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")},
    "uniform": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
}


def _loss_and_gradients(config: Config) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    [gpt], _ = build_small_model(config)
    tokens = torch.randint(0, 250, (2, 17), generator=torch.Generator().manual_seed(0))
    losses = gpt(tokens[:, :-1], torch.arange(16).expand(2, 16), labels=tokens[:, 1:])
    losses.sum().backward()
    return losses.detach(), {name: tensor.grad for name, tensor in global_named_parameters([gpt])}


@pytest.mark.parametrize(
    "layout",
    [
        {},
        # Slow: sequence parallelism divides more of the same.
        pytest.param({"tensor_model_parallel_size": 2}, marks=pytest.mark.slow),
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ],
)
@pytest.mark.parametrize("model", [DROPOUT, {**LLAMA, **DROPOUT}], ids=["GPT-2", "Llama"])
def test_recompute_is_bitwise_the_same(model: dict[str, Any], layout: dict[str, Any]) -> None:
    size = layout.get("tensor_model_parallel_size", 1)
    layout = {**layout, "world_size": size}
    plain, without_dropout = small_config(model, layout), small_config({**model, "attention_dropout": 0.0}, layout)
    recomputed = [small_config(model, layout, method) for method in METHODS.values()]
    for expected, other, *found in run_ranks(size, in_turn, _loss_and_gradients, [plain, without_dropout, *recomputed]):
        assert not torch.equal(expected[0], other[0])
        for method, got in zip(METHODS, found, strict=True):
            assert torch.equal(got[0], expected[0]), method
            for name, gradient in got[1].items():
                assert torch.equal(gradient, expected[1][name]), (method, name)


def test_numbers_in_fp8_are_rounded_alike_again() -> None:
    """Scales are found again, together with the other ranks."""
    layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "world_size": 2}
    in_fp8 = {"fp8_format": "hybrid", "fp8_recipe": "rowwise"}
    model = {**LLAMA, **SMALL, "hidden_dropout": 0.1}
    configs = [small_config(model, layout, {**in_fp8, **method}) for method in ({}, *METHODS.values())]
    for without, expected, *found in run_ranks(
        2, in_turn, _loss_and_gradients, [small_config(model, layout), *configs]
    ):
        assert not torch.equal(without[0], expected[0])
        for method, got in zip(METHODS, found, strict=True):
            assert torch.equal(got[0], expected[0]), method
            for name, gradient in got[1].items():
                assert torch.equal(gradient, expected[1][name]), (method, name)
