"""Fake CUDA tensors, and the backward pass of one function on them."""

from typing import Any

import torch


def backward(result: torch.Tensor, name: str, grad: torch.Tensor) -> list[torch.Tensor]:
    """The gradients that one autograd function behind a result returns. torch's engine needs a real GPU; the functions
    do not."""
    nodes: list[Any] = [result.grad_fn]
    while type(nodes[-1]).__name__ != name:
        nodes.append(nodes[-1].next_functions[0][0])
    function = type(nodes[-1])._forward_cls
    return [made for made in function.backward(nodes[-1], grad) if made is not None]


def on_gpu(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, device="cuda", dtype=dtype)
