"""Counts the bytes that the model keeps on one rank between steps, at the tensors' storages.

A storage counts once, however many tensors look into it: megatron-core's parameters are views of its buffers, and an
fp32 optimizer updates the weights themselves. What a step needs for a while (activations, gathered weights that are
freed again, scratch space of collectives) is not counted; ask the device's allocator for that.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from megatron_ext.train.run import Run


@dataclass(frozen=True)
class Bytes:
    """The live bytes of one rank."""

    weights: int
    """Bytes of what the forward pass computes with."""

    gradients: int

    optimizer: int
    """Bytes of moments and, for 16-bit weights, of the fp32 master copy; not of what is already counted as weights."""

    host: int = 0
    """Bytes in host memory under --optimizer-cpu-offload and --torch-fsdp2-cpu-offload: weights, gradients and moments
    that are updated there."""

    @property
    def total(self) -> int:
        """Sum of what is on the device."""
        return self.weights + self.gradients + self.optimizer


def bytes_per_rank(run: Run) -> Bytes:
    """Return what this rank holds now. Call it after a step: before the first, the optimizer has no moments."""
    seen: set[int] = set()
    held = [_count(tensors, seen) for tensors in (_weights(run), _gradients(run), _optimizer(run), _host(run))]
    if run.sharding.lives_on_host:
        return Bytes(0, 0, 0, host=sum(held))
    return Bytes(*held)


def _weights(run: Run) -> Iterator[torch.Tensor | None]:
    for chunk in run.chunks:
        yield from run.sharding.held_weights(chunk)


def _gradients(run: Run) -> Iterator[torch.Tensor | None]:
    for chunk in run.chunks:
        yield from run.sharding.held_gradients(chunk)
    for part in run.sharding.parts(run.optimizer):
        for group in part.core.optimizer.param_groups:
            yield from (parameter.grad for parameter in group["params"])


def _optimizer(run: Run) -> Iterator[torch.Tensor | None]:
    for part in run.sharding.parts(run.optimizer):
        for group in part.core.optimizer.param_groups:
            yield from group["params"]
        for torch_optimizer in part.updater.torch_optimizers:
            if torch_optimizer not in part.updater.host_optimizers:
                yield from _state(torch_optimizer)


def _host(run: Run) -> Iterator[torch.Tensor | None]:
    for part in run.sharding.parts(run.optimizer):
        for torch_optimizer in part.updater.host_optimizers:
            for group in torch_optimizer.param_groups:
                yield from group["params"]
                yield from (parameter.grad for parameter in group["params"])
            yield from _state(torch_optimizer)


def _state(torch_optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in torch_optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _count(tensors: Iterable[torch.Tensor | None], seen: set[int]) -> int:
    """Return the bytes of the storages that are not yet in `seen`, and add these to it."""
    total = 0
    for tensor in tensors:
        if tensor is None:
            continue
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
