"""torch's operators that multiply while tensors travel between GPUs, through memory that all of them see (symmetric
memory)."""

from typing import Any

import torch
from torch.distributed import ProcessGroup

_TRIED = 1 << 20
"""Bytes of the memory by which `obstacle` finds out; the operators enlarge it to what they need."""


def gather_multiply(
    slice_SBK: torch.Tensor, matrix_KN: torch.Tensor, group: ProcessGroup, *, keeps: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the first dimension of x gathered over the ranks, if it is to be kept, and that times the matrix.

    Args:
        slice_SBK: this rank's slice of x along the first dimension.
    """
    gathered, (product,) = _operators().fused_all_gather_matmul(
        slice_SBK.contiguous(), [matrix_KN], 0, group.group_name, return_A=keeps
    )
    return gathered, product


def multiply_scatter(x_SBK: torch.Tensor, matrix_KN: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Return this rank's slice, along the first dimension, of the sum of the products over the ranks."""
    return _operators().fused_matmul_reduce_scatter(x_SBK.contiguous(), matrix_KN, "sum", 0, group.group_name)


def obstacle(group: ProcessGroup, device: torch.device) -> str | None:
    """Return why the GPUs of this group cannot share memory, the same on all of its ranks; None if they can.
    Collective."""
    from torch.distributed import _symmetric_memory

    reason = None
    try:
        _symmetric_memory.get_symm_mem_workspace(group.group_name, _TRIED)
    except Exception as error:  # of torch, CUDA or the driver, each with a kind of its own
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
    failed = torch.tensor(float(reason is not None), device=device)
    torch.distributed.all_reduce(failed, torch.distributed.ReduceOp.MAX, group=group)
    if not failed.item():
        return None
    return f"torch has no symmetric memory for these GPUs: {reason or 'another rank was refused it'}"


def _operators() -> Any:
    from torch.distributed import _symmetric_memory  # which registers them

    del _symmetric_memory
    return torch.ops.symm_mem
