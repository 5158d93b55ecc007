"""Operations on many tensors at once, each one kernel on a GPU: what an update does to all weights."""

import torch

from megatron_ext.device.triton import kernel_choice

Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]
"""What torch takes for a list of tensors."""


def copy_(tensors: Tensors, sources: Tensors) -> None:
    """Copy each source into its tensor, of whatever type."""
    if tensors:
        torch._foreach_copy_(tensors, sources)  # pyright: ignore[reportPrivateImportUsage]


def scale_(tensors: Tensors, factor: torch.Tensor) -> None:
    """Multiply the tensors, which are on one device, in place by a scalar in fp32, wherever that is.

    Our own kernel neither reads nor writes them where the scalar is 1; the host does not know whether it is.
    """
    if not tensors:
        return
    factor = factor.to(tensors[0].device)
    if _takes([*tensors, factor]):
        from megatron_ext.device.triton import many_tensors

        many_tensors.scale_(tensors, factor)
    else:
        torch._foreach_mul_(tensors, factor)  # pyright: ignore[reportPrivateImportUsage]


def lerp_(tensors: Tensors, ends: Tensors, share: float | torch.Tensor) -> None:
    """Move each tensor towards its end by a share of the difference: `torch.Tensor.lerp_` of each.

    Args:
        tensors: tensors on one device.
        ends: tensors of the same shapes and types.
        share: a number, or a scalar in fp32 on the device; where it is 0 our own kernel reads and writes nothing.
    """
    if not tensors:
        return
    if not isinstance(share, torch.Tensor):
        torch._foreach_lerp_(tensors, ends, share)  # pyright: ignore[reportPrivateImportUsage]
    elif _takes([*tensors, *ends, share]):
        from megatron_ext.device.triton import many_tensors

        many_tensors.lerp_(tensors, ends, share)
    else:  # torch has no kernel over lists that takes a scalar of the device
        for tensor, end in zip(tensors, ends, strict=True):
            tensor.lerp_(end, share)


def _takes(tensors: Tensors) -> bool:
    """Return whether our own kernels compute: they go over memory without gaps, in fp32."""
    return kernel_choice.take(tensors[0]) and all(one.dtype == torch.float32 and one.is_contiguous() for one in tensors)
