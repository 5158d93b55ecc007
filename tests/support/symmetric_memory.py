"""Stand-ins for torch's operators over symmetric memory, which only GPUs have: gather, then multiply; multiply, then
sum. Their schemas are torch's own, so that a call that a GPU would refuse is refused here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed._symmetric_memory
from torch._C._distributed_c10d import _resolve_process_group

from megatron_ext.device.cpu import CpuDevice

calls: list[tuple[str, tuple[int, ...]]] = []
"""Operator and shape of what was multiplied, of every call in this process."""


def _gather_multiply(
    shard: torch.Tensor, matrices: list[torch.Tensor], dim: int, name: Any, *, return_A: bool = True
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    assert (dim, shard.is_contiguous()) == (0, True)
    calls.append(("fused_all_gather_matmul", tuple(shard.shape)))
    group = _resolve_process_group(name)
    whole = shard.new_empty(shard.size(0) * group.size(), *shard.shape[1:])
    torch.distributed.all_gather_into_tensor(whole, shard, group=group)
    return whole if return_A else None, [whole @ matrix for matrix in matrices]


def _multiply_scatter(x: torch.Tensor, matrix: torch.Tensor, reduction: str, dim: int, name: Any) -> torch.Tensor:
    assert (reduction, dim, x.is_contiguous()) == ("sum", 0, True)
    calls.append(("fused_matmul_reduce_scatter", tuple(x.shape)))
    group = _resolve_process_group(name)
    part = x.new_empty(x.size(0) // group.size(), *x.shape[1:-1], matrix.size(1))
    torch.distributed.reduce_scatter_tensor(part, x @ matrix, group=group)
    return part


@contextmanager
def on_cpu_ranks() -> Iterator[None]:
    """Have the operators compute on CPU ranks, and the CPU say that it lacks nothing."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", _gather_multiply, "CPU")
    library.impl("fused_matmul_reduce_scatter", _multiply_scatter, "CPU")
    lacks, CpuDevice.lacks_for_overlap = CpuDevice.lacks_for_overlap, lambda *_: None  # pyright: ignore
    calls.clear()
    try:
        yield
    finally:
        CpuDevice.lacks_for_overlap = lacks
        library._destroy()
