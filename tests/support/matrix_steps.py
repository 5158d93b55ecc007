"""Steps of an optimizer of matrices, whose gradients depend on the weights."""

from typing import Any

import torch

SHAPES = [(64, 64), (64, 64), (96, 64), (64, 96), (48, 20), (1, 8)]


def trained(optimizer: Any, weights: list[torch.Tensor], steps: int = 20) -> list[torch.Tensor]:
    """Return the weights after some steps whose gradients depend on them."""
    draws = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=draws) + weight.detach()
        optimizer.step()
    return weights


def begun(shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) * 0.1 for shape in shapes]
