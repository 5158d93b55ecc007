"""Takes the norm of many gradients, and scales them, in a few kernels and without waiting for the device.

Without apex or Transformer Engine megatron-core reads the norm of every gradient back to the host, one by one, and
copies masters into 16-bit weights one by one; `replace_loops` has it call `l2_norm` and `copy_each`, with the same
bits. It also reads the norm over all ranks, for a coefficient on the host, and clips by a product and a copy for each
gradient. `global_norm`, `clipping_share` and `scale_gradients` do the same on the device, and with the same bits.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer import optimizer as core_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer

from megatron_ext.device import many_tensors


def replace_loops() -> None:
    """Have megatron-core copy and, unless it has a kernel of a package, take norms with the functions below."""
    core_optimizer._multi_tensor_copy_this_to_that = copy_each
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm


def copy_each(this: list[torch.Tensor], that: list[torch.Tensor], overflow_buf: torch.Tensor | None = None) -> None:
    """Copy each tensor of `this` into its counterpart of `that`, of whatever type, and say that nothing overflowed."""
    if overflow_buf is not None:
        overflow_buf.zero_()
    many_tensors.copy_(that, this)


def l2_norm(
    chunk_size: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool, *_: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the L2 norm over all tensors of the first list, fp32 [1] on their device, and with `per_tensor` the norm
    of each tensor."""
    norms = torch.stack([*torch._foreach_norm(lists[0], 2)])  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(norms).to(torch.float32).view(1), norms if per_tensor else None


class GlobalNorm(NamedTuple):
    """The L2 norm of an update's gradients over all ranks, before clipping, on the device."""

    squares: torch.Tensor
    """Square of the norm, fp32 [S]: one number, or one for each set of optimizers with other ranks (experts)."""
    gradients: list[torch.Tensor]
    """This rank's gradients that are in the norm."""
    of_each: torch.Tensor | None
    """Norms of `gradients`, [N]; None without gradients."""

    def on_device(self) -> torch.Tensor:
        """Return the norm, a scalar in fp64."""
        norms = self.squares.double().sqrt()
        return norms[0] if len(norms) == 1 else norms.square().sum().sqrt()


def norm_of(squares: Sequence[float]) -> float:
    """Return the norm from `GlobalNorm.squares`, as megatron-core computes it on the host."""
    norms = [square**0.5 for square in squares]
    return norms[0] if len(norms) == 1 else math.sqrt(sum(norm**2 for norm in norms))


@torch.no_grad()
def global_norm(optimizer: ChainedOptimizer, device: torch.device) -> GlobalNorm:
    """Take the norm over all ranks, with the bits of megatron-core's `get_grad_norm`. Collective."""
    parts = optimizer.chained_optimizers
    is_one = len(parts) == 1 or optimizer.grads_states_parallel_group_is_shared()
    found = [_norm_of_parts(together, device) for together in ([parts] if is_one else [[part] for part in parts])]
    of_each = [norms for *_, norms in found if norms is not None]
    return GlobalNorm(
        torch.cat([square for square, *_ in found]),
        [gradient for _, gradients, _ in found for gradient in gradients],
        torch.cat(of_each) if of_each else None,
    )


def _norm_of_parts(
    parts: Sequence[MegatronOptimizer], device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
    """Return the square of the norm over the ranks of these optimizers, which are the same, fp32 [1]; this rank's
    gradients in it, and their norms."""
    gradients = [gradient for part in parts for gradient in part.get_grads_for_grad_norm()]
    square, of_each = torch.zeros(1, dtype=torch.float, device=device), None
    if gradients:
        overflow = torch.zeros(1, dtype=torch.int, device=device)
        norm, of_each = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], True)
        square = norm**2.0
    torch.distributed.all_reduce(square, group=parts[0].get_grad_stats_parallel_group())
    return square, gradients, of_each


def clipping_share(most: float, norm: torch.Tensor) -> torch.Tensor:
    """Return the factor, at most 1, that brings gradients of this norm to a norm of `most`: an fp32 scalar on the
    device. Gradients whose norm is NaN keep their values, as in megatron-core.

    Args:
        norm: scalar in fp64.
    """
    share = most / (norm + 1e-6)
    return torch.where(share < 1.0, share, 1.0).float()


@torch.no_grad()
def scale_gradients(optimizer: ChainedOptimizer, share: torch.Tensor) -> None:
    """Multiply the gradients of the update in place by an fp32 scalar, on the device or in host memory; our own kernel
    neither reads nor writes them where it is 1."""
    for part in optimizer.chained_optimizers:
        many_tensors.scale_([main.grad for main in part.get_parameters() if main.grad is not None], share)
