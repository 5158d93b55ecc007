"""Our norms against their formulas in fp64, and the mark that sequence parallelism needs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.model.config import transformer_config
from megatron_ext.parts.catalogue import parameters
from megatron_ext.parts.norm.compute import LayerNorm, ProjectionNorm, RMSNorm, norm_class
from tests.support.small_models import LLAMA, OLMO2, build_small_model, small_config

PARALLEL = {"tensor_model_parallel_size": 2, "world_size": 2, "sequence_parallel": True}


def _written_out(norm: RMSNorm | LayerNorm, x: torch.Tensor) -> torch.Tensor:
    if isinstance(norm, LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    normal = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    return normal * norm.weight.double() + (norm.bias.double() if isinstance(norm, LayerNorm) else 0.0)


@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 3e-6), (True, 2e-2)])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_equals_its_formula(kind: str, bf16: bool, tolerance: float) -> None:
    torch.manual_seed(0)
    config = transformer_config(small_config(training={"bf16": bf16}), "cpu")
    norm = norm_class(kind)(config, 48, eps=1e-3)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter.data)
    x = (3.0 * torch.randn(7, 2, 48) + 1.0).to(config.params_dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()

    result, expected = norm(x), _written_out(norm, exact)
    assert result.dtype == config.params_dtype
    torch.testing.assert_close(result.double(), expected, atol=tolerance, rtol=tolerance)
    weight = torch.randn(7, 2, 48).to(config.params_dtype)
    [got] = torch.autograd.grad((result * weight).sum(), x)
    [wanted] = torch.autograd.grad((expected * weight.double()).sum(), exact)
    torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_parameters_are_marked_under_sequence_parallelism(kind: str, sequence_parallel: bool) -> None:
    layout = {**PARALLEL, "sequence_parallel": sequence_parallel}
    norm = norm_class(kind)(transformer_config(small_config(layout=layout), "cpu"), 48)
    assert [parameter.sequence_parallel for parameter in norm.parameters()] == [sequence_parallel] * len(  # pyright: ignore
        list(norm.parameters())
    )


@pytest.mark.parametrize("model", [{}, {**LLAMA, "qk_layernorm": True}, OLMO2], ids=["GPT-2", "Qwen3", "OLMo 2"])
def test_every_norm_of_a_model_has_the_epsilon_that_is_given(model: dict[str, Any]) -> None:
    config = small_config({**model, "num_layers": 1, "norm_epsilon": 0.125})
    [gpt], _ = build_small_model(config)
    norms = {
        name: module.eps
        for name, module in gpt.named_modules()
        if isinstance(module, RMSNorm | LayerNorm | ProjectionNorm)
    }
    expected = [one.name.removesuffix(".weight") for one in parameters(config) if one.name.endswith("norm.weight")]
    assert sorted(norms) == sorted(expected)
    assert set(norms.values()) == {0.125}


def test_a_divided_norm_is_of_the_ranks_that_divide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of two holds heads 2 and 3 of four, and the other rank's squares are as large: forward and backward both
    ask their own group. Gradients are those of the whole vector in fp64."""
    torch.manual_seed(0)
    config = transformer_config(small_config(), "cpu")
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    norm = ProjectionNorm(config, 8, 1e-3, heads=4, tp_group=group)
    torch.nn.init.normal_(norm.weight.data)
    whole = torch.randn(3, 2, 4, 8)
    upstream = torch.randn(3, 2, 4, 8)
    exact = whole.double().requires_grad_()
    weight = norm.weight.detach().double().requires_grad_()
    flat = exact.flatten(2)
    expected = (flat / (flat.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight).view(whole.shape)
    expected.backward(upstream.double())
    others = {
        "squares": whole[:, :, :2].flatten(2).square().sum(-1, keepdim=True),
        "radial": (upstream * expected.detach())[:, :, :2].flatten(2).sum(-1, keepdim=True).float(),
    }
    asked: list[Any] = []

    def add(values: torch.Tensor, group: Any = None) -> None:
        values += others["radial" if asked else "squares"]
        asked.append(group)

    monkeypatch.setattr(torch.distributed, "all_reduce", add)
    own = whole[:, :, 2:].clone().requires_grad_()
    found = norm(own)
    found.backward(upstream[:, :, 2:])
    assert asked == [group, group]
    torch.testing.assert_close(found, expected.detach()[:, :, 2:].float(), rtol=1e-5, atol=1e-6)
    assert own.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(own.grad, exact.grad[:, :, 2:].float(), rtol=1e-4, atol=1e-5)
    assert norm.weight.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(norm.weight.grad[16:], weight.grad[16:].float(), rtol=1e-4, atol=1e-5)
    assert norm.weight.grad[:16].count_nonzero() == 0


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("rank", range(4))
def test_ranks_that_share_a_head_count_it_once(rank: int, bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks have two heads, each of them two ranks. In 16 bits the result and the gradient are rounded once."""
    generator = torch.Generator().manual_seed(rank)
    group: Any = SimpleNamespace(size=lambda: 4, rank=lambda: rank)
    config = transformer_config(small_config(training={"bf16": bf16}), "cpu")
    norm = ProjectionNorm(config, 8, 1e-3, heads=2, tp_group=group)
    torch.nn.init.normal_(norm.weight.data, generator=generator)
    whole, upstream = (torch.randn(40, 2, 2, 8, generator=generator).to(config.params_dtype) for _ in range(2))
    exact = whole.double().requires_grad_()
    flat = exact.flatten(2)
    normal = flat / (flat.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    expected = (normal * norm.weight.detach().double()).view(whole.shape)
    [wanted] = torch.autograd.grad(expected, exact, upstream.double())
    head = rank // 2
    sums = [whole.double().square().sum(-1), (upstream.double() * expected.detach()).sum(-1)]

    def add(values: torch.Tensor, group: Any = None) -> None:
        of_heads = sums.pop(0)
        own = of_heads[..., head : head + 1]
        torch.testing.assert_close(values.double(), own, rtol=1e-4, atol=1e-4)
        values.copy_(2.0 * of_heads.sum(-1, keepdim=True))

    monkeypatch.setattr(torch.distributed, "all_reduce", add)
    own = whole[:, :, head : head + 1].clone().requires_grad_()
    found = norm(own)
    [got] = torch.autograd.grad(found, own, upstream[:, :, head : head + 1])
    assert sums == []
    rounding = 2.0**-8 if bf16 else 0.0
    for one, known in ((found, expected), (got, wanted)):
        known = known.detach()[:, :, head : head + 1]
        assert ((one.detach().double() - known).abs() - rounding * known.abs()).max() < 1e-5
