"""Backward passes in two halves: each product once, and the same gradients."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron_ext.device import kernels, split_backward
from megatron_ext.device.kernels import linear_by_expert


class Products(TorchDispatchMode):
    """Counts the matrix products that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        self.count += name in ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def split() -> Iterator[None]:
    split_backward.split(True)
    yield
    split_backward.split(False)


def counted(run: Callable[[], object]) -> int:
    with Products() as products:
        run()
    return products.count


def layers(count: int = 3) -> list[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    torch.manual_seed(1)
    return [(torch.nn.Parameter(torch.randn(6, 6)), torch.nn.Parameter(torch.randn(6))) for _ in range(count)]


def through(weights: list[Any], x: torch.Tensor) -> torch.Tensor:
    for weight, bias in weights:
        x = kernels.linear(x, weight, bias).tanh()
    return x


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("recomputes", [False, True])
def test_every_product_is_made_once_and_the_gradients_are_the_same(recomputes: bool) -> None:
    weights, reference = layers(), layers()
    x, other = torch.randn(5, 2, 6, requires_grad=True), torch.randn(5, 2, 6)
    y: Any = checkpoint(through, weights, x, use_reentrant=True) if recomputes else through(weights, x)
    with split_backward.kept_products() as products:
        again = 3 if recomputes else 0
        assert counted(lambda: y.backward(other)) == 3 + again, "the inputs' gradients alone"
    assert [weight.grad for weight, _ in weights] == [None] * 3
    assert counted(lambda: [product() for _, product in products]) == 3, "the weights' gradients alone"
    split_backward.split(False)
    same = x.detach().clone().requires_grad_()
    through(reference, same).backward(other)
    torch.testing.assert_close(x.grad, same.grad)
    for mine, theirs in zip(weights, reference, strict=True):
        for one, two in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one.grad, two.grad)


@pytest.mark.usefixtures("split")
def test_outside_of_the_context_nothing_is_kept_back() -> None:
    weights = layers(1)
    through(weights, torch.randn(5, 6)).sum().backward()
    assert weights[0][0].grad is not None


@pytest.mark.usefixtures("split")
def test_hooks_of_a_weight_run_when_its_gradient_is_made() -> None:
    [(weight, bias)] = layers(1)
    seen: Counter[str] = Counter()
    weight.register_post_accumulate_grad_hook(lambda _: seen.update(["weight"]))
    bias.register_post_accumulate_grad_hook(lambda _: seen.update(["bias"]))
    with split_backward.kept_products() as products:
        through([(weight, bias)], torch.randn(5, 6)).sum().backward()
    assert seen == {"bias": 1}
    for _, product in products:
        product()
    assert seen == {"bias": 1, "weight": 1}


@pytest.mark.usefixtures("split")
def test_experts_are_split_too_those_without_tokens_among_them() -> None:
    torch.manual_seed(2)
    stacked = torch.nn.Parameter(torch.randn(3, 4, 6))
    x, other, tokens = torch.randn(5, 6, requires_grad=True), torch.randn(5, 4), torch.tensor([2, 0, 3])

    def multiply(rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
        return linear_by_expert(rows, matrices, tokens)

    y = split_backward.linear_by_expert(x, stacked, tokens.tolist(), multiply)
    with split_backward.kept_products() as products:
        y.backward(other)
    assert stacked.grad is None
    for _, product in products:
        product()
    split_backward.split(False)
    same, again = x.detach().clone().requires_grad_(), stacked.detach().clone().requires_grad_()
    multiply(same, again).backward(other)
    torch.testing.assert_close(x.grad, same.grad)
    torch.testing.assert_close(stacked.grad, again.grad)


def test_torchs_own_split_makes_the_products_of_megatron_cores_layers_twice() -> None:
    """Why the layers do it themselves: should this fail one day, torch's or the engine's has become enough."""
    weight = torch.nn.Parameter(torch.randn(6, 6))
    x = torch.randn(5, 2, 6, requires_grad=True)
    apply: Any = LinearWithGradAccumulationAndAsyncCommunication.apply
    y = apply(x * 1.0, weight, None, False, False, False, None, 0, None, 1)
    halves: Any = []
    inputs = counted(lambda: halves.extend(stage_backward_input([y], [torch.ones_like(y)], [x], iter([weight]))[1]))
    weights = counted(lambda: stage_backward_weight(iter([weight]), halves))
    assert (inputs, weights) == (2, 2), "one product each would be a split"
