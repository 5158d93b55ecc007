"""Takes the norm of many gradients, and scales them, in a few kernels and without waiting for the device.

Without apex or Transformer Engine megatron-core reads the norm of every gradient back to the host, one by one, and
scales by a product and a copy for each. These two functions give the same bits; megatron-core calls them in place of
its own after `replace_loops`.
"""

from typing import Any

import torch
from megatron.core import utils
from megatron.core.optimizer import clip_grads


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
) -> tuple[torch.Tensor, None]:
    """Return the L2 norm over all tensors of the first list, fp32 [1] on their device, and no norms of each."""
    norms = torch._foreach_norm(lists[0], 2)  # pyright: ignore[reportPrivateImportUsage]
    return torch.linalg.vector_norm(torch.stack([*norms])).to(torch.float32).view(1), None


def scale(chunk_size: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], factor: float) -> None:
    """Multiply the tensors of the first list in place; megatron-core names the same list as source and target."""
    sources, targets = lists
    assert all(source is target for source, target in zip(sources, targets, strict=True)), "not in place"
    scale_all(targets, factor)


def scale_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply all tensors in place."""
    if tensors:
        torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateImportUsage]
