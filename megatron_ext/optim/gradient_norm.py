"""Takes the norm of many gradients, and scales them, in a few kernels and without waiting for the device.

Without apex or Transformer Engine megatron-core reads the norm of every gradient back to the host, one by one, and
scales by a product and a copy for each. These two functions give the same bits; megatron-core calls them in place of
its own after `replace_loops`.

Its norm over all ranks is read back once, for a coefficient on the host. `squared_norm` and `scale_by` do the
same without that, and with the same bits.
"""

from typing import Any

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import MegatronOptimizer


def replace_loops() -> None:
    """Have megatron-core take norms and clip with the functions below, unless it has kernels of a package."""
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = l2_norm
    if clip_grads.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
        clip_grads.multi_tensor_scale_impl = scale


def scales_here() -> bool:
    """Return whether gradients are scaled by `scale_all`, and by no package's kernel."""
    return clip_grads.multi_tensor_scale_impl is scale


def l2_norm(
    chunk_size: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], per_tensor: bool, *_: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the L2 norm over all tensors of the first list, fp32 [1] on their device, and with `per_tensor` those of
    each."""
    norms = torch.stack([*torch._foreach_norm(lists[0], 2)])  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(norms).to(torch.float32).view(1), norms if per_tensor else None


def scale(chunk_size: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], factor: float) -> None:
    """Multiply the tensors of the first list in place; megatron-core names the same list as source and target."""
    sources, targets = lists
    assert all(source is target for source, target in zip(sources, targets, strict=True)), "not in place"
    scale_all(targets, factor)


def scale_all(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply all tensors in place, by a number or by an fp32 scalar on their device."""
    if tensors:
        torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateImportUsage]


def squared_norm(
    optimizer: MegatronOptimizer, device: torch.device
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor | None]:
    """Take the norm over all ranks. Collective.

    Returns:
        Its square, fp32 [1] on `device`, whose root in fp64 is what `get_grad_norm` returns; this rank's gradients
        that are in it, and the norm of each, [N] (None without gradients).
    """
    gradients = optimizer.get_grads_for_grad_norm()
    square = torch.zeros(1, dtype=torch.float, device=device)
    of_each = None
    if gradients:
        overflow = torch.zeros(1, dtype=torch.int, device=device)
        norm, of_each = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [gradients], True)
        square = norm**2.0
    torch.distributed.all_reduce(square, group=optimizer.get_grad_stats_parallel_group())
    return square, gradients, of_each


def scale_by(optimizer: MegatronOptimizer, factor: torch.Tensor) -> None:
    """Multiply the gradients of the update in place by an fp32 scalar on their device."""
    main: Any = optimizer.get_parameters()
    scale_all([parameter.grad for parameter in main if parameter.grad is not None], factor)
