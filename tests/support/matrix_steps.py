"""Steps of an optimizer of matrices, whose gradients depend on the weights."""

from collections.abc import Callable
from typing import Any

import torch

from megatron_ext.parallel.matrices import Matrix

SHAPES = [(64, 64), (64, 64), (96, 64), (64, 96), (48, 20), (1, 8)]


def trained(optimizer: Any, weights: list[torch.Tensor], steps: int = 20) -> list[torch.Tensor]:
    """Return the weights after some steps whose gradients depend on them."""
    draws = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draws).to(weight.dtype) + weight.detach()
        optimizer.step()
    return weights


def begun(shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) * 0.1 for shape in shapes]


def assert_a_stack_is_its_matrices(build: Callable[[list[torch.Tensor]], torch.optim.Optimizer]) -> None:
    """Compare two steps of a stack of three experts, whose gradients differ in size, with those of each alone."""
    [stack] = begun([(3, 8, 12)])
    each, sizes = [one.clone() for one in stack], torch.tensor([1, 5, 9])[:, None, None]
    gradient = torch.randn(stack.shape, generator=torch.Generator().manual_seed(1)) * sizes
    vars(stack)["matrix"], stack.grad = Matrix((3, 8, 12)), gradient
    for one, own in zip(each, gradient, strict=True):
        one.grad = own
    for weights in ([stack], each):
        optimizer = build(weights)
        optimizer.step()
        optimizer.step()
    torch.testing.assert_close(stack, torch.stack(each))
