"""One kernel over many tensors in fp32, which reads and writes none of them where a factor on the device says so.

A kernel of torch over lists of tensors (`torch._foreach_mul_`) reads and writes all of them, whatever the factor is,
and the host would have to wait for the device to leave it out.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megatron_ext.device.triton.kernel_choice import launch

_BLOCK = 1024
_PROGRAMS = 128
"""Programs that share a tensor."""


def scale_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply the tensors in place by a factor, fp32 [], and leave them alone where it is 1."""
    rows = [(one.data_ptr(), one.numel()) for one in tensors]
    launch(scale_many, (len(rows), _PROGRAMS), _table(rows, factor), factor, BLOCK=_BLOCK, num_warps=4)


def lerp_(tensors: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], share: torch.Tensor) -> None:
    """Move each tensor towards its end by a share of the difference, fp32 [], and leave all alone where it is 0."""
    rows = [(one.data_ptr(), end.data_ptr(), one.numel()) for one, end in zip(tensors, ends, strict=True)]
    launch(lerp_many, (len(rows), _PROGRAMS), _table(rows, share), share, BLOCK=_BLOCK, num_warps=4)


def _table(rows: Sequence[tuple[int, ...]], like: torch.Tensor) -> torch.Tensor:
    """Return addresses and sizes as the kernels read them, without waiting for the device."""
    return torch.tensor(rows, dtype=torch.int64, pin_memory=like.device.type == "cuda").to(
        like.device, non_blocking=True
    )


@triton.jit
def scale_many(table, factor, BLOCK: tl.constexpr):
    """Scales a part of the tensor whose address and size are in row `program_id(0)` of the table."""
    times = tl.load(factor)
    if times != 1.0:
        row = table + 2 * tl.program_id(0).to(tl.int64)
        tensor, size = tl.load(row).to(tl.pointer_type(tl.float32)), tl.load(row + 1)
        start = tl.program_id(1).to(tl.int64) * BLOCK
        while start < size:
            place = start + tl.arange(0, BLOCK)
            inside = place < size
            tl.store(tensor + place, tl.load(tensor + place, mask=inside) * times, mask=inside)
            start += tl.num_programs(1) * BLOCK


@triton.jit
def lerp_many(table, share, BLOCK: tl.constexpr):
    """Moves a part of the tensor of row `program_id(0)`: address, address of its end, size. By torch's formula."""
    by = tl.load(share)
    if by != 0.0:
        row = table + 3 * tl.program_id(0).to(tl.int64)
        tensor = tl.load(row).to(tl.pointer_type(tl.float32))
        end, size = tl.load(row + 1).to(tl.pointer_type(tl.float32)), tl.load(row + 2)
        start = tl.program_id(1).to(tl.int64) * BLOCK
        while start < size:
            place = start + tl.arange(0, BLOCK)
            inside = place < size
            old, new = tl.load(tensor + place, mask=inside), tl.load(end + place, mask=inside)
            moved = tl.where(by < 0.5, old + by * (new - old), new - (new - old) * (1.0 - by))
            tl.store(tensor + place, moved, mask=inside)
            start += tl.num_programs(1) * BLOCK
