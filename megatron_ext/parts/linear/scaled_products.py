"""Multiplies matrices in FP8: each is divided by scales that bring its largest numbers to FP8's largest, and rounded.

    x, weight = quantize(x, Block(1, None), E4M3), quantize(weight, Block(1, None), E4M3)
    y = product(x, weight, torch.bfloat16)

A scale belongs to a block of a matrix: the block's largest absolute value over the format's largest value (current
scaling, no history). E4M3 has 3 bits of mantissa and reaches 448, E5M2 has 2 and reaches 57,344 (Micikevicius et al.
2022, arXiv:2209.05433), so that rounding changes a number by at most 2^-4 or 2^-3 of itself, or, where it is small, by
2^-10 or 2^-17 scales.

On a GPU the product is torch's `scaled_mm`. Elsewhere the same numbers are multiplied and added in fp32.

Shapes: R rows and C columns of a matrix; M and N rows of the two factors of a product, K columns of both.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.jit import jit_fuser
from torch.distributed import ProcessGroup

from megatron_ext.device.kernels import linear
from megatron_ext.parts.linear.describe import FP8_BLOCK

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Block(NamedTuple):
    """The part of a matrix that has one scale, in rows and columns; None stands for all of them."""

    rows: int | None
    columns: int | None

    @property
    def turned(self) -> "Block":
        """This block in the transposed matrix."""
        return Block(self.columns, self.rows)


class Recipe(NamedTuple):
    """The blocks of the factors of a product."""

    activations: Block
    """Block of an activation or its gradient, whose columns are summed over."""
    weights: Block
    powers_of_two: bool = False
    """Whether scales are rounded up to powers of two, as Transformer Engine's are for blocks."""


RECIPES = {
    "tensorwise": Recipe(Block(None, None), Block(None, None)),
    "rowwise": Recipe(Block(1, None), Block(1, None)),
    "blockwise": Recipe(Block(1, FP8_BLOCK), Block(FP8_BLOCK, FP8_BLOCK), powers_of_two=True),
}
"""Value of --fp8-recipe -> its blocks; blockwise has the blocks of DeepSeek-V3 (arXiv:2412.19437, section 3.3)."""

_KINDS = {
    Block(None, None): "TensorWise",
    Block(1, None): "RowWise",
    Block(1, FP8_BLOCK): "BlockWise1x128",
    Block(FP8_BLOCK, FP8_BLOCK): "BlockWise128x128",
}
"""torch's names of the blocks of a factor."""

_ROWS_IN_FP32, _HOPPER = "2.15", 9
"""A version of torch, and a major compute capability."""


class Quantized(NamedTuple):
    """A matrix in FP8: `values`, each times the scale of its block."""

    values_RC: torch.Tensor
    scales: torch.Tensor
    """Scales in fp32, [blocks down, blocks across]."""
    largest: torch.Tensor
    """Largest absolute value of each block before it was rounded, as `scales`."""
    block: Block

    def transposed(self) -> "Quantized":
        """Return the transposed matrix, its values in the order of its own rows."""
        return Quantized(self.values_RC.t().contiguous(), self.scales.t(), self.largest.t(), self.block.turned)

    def dequantized(self) -> torch.Tensor:
        """Return the matrix in fp32."""
        products = _in_blocks(self.values_RC.float(), self.scales) * self.scales[:, None, :, None]
        return products.view(self.values_RC.shape)


Cut = tuple[Sequence[ProcessGroup], Sequence[ProcessGroup]]
"""The ranks that rows, and columns, of a matrix are divided over; no group where this rank has all."""

WHOLE: Cut = ((), ())


def quantize(
    x_RC: torch.Tensor,
    block: Block,
    dtype: torch.dtype,
    *,
    powers_of_two: bool = False,
    cut: Cut = WHOLE,
    largest: torch.Tensor | None = None,
) -> Quantized:
    """Return a matrix in FP8.

    Collective where a block goes across ranks: they take the largest value of all, so that a matrix that is cut gets
    the scales and values that it has in one piece.

    Args:
        x_RC: a contiguous matrix, whose sides are multiples of the block's.
        block: the part of a matrix that has one scale.
        dtype: `E4M3` or `E5M2`.
        powers_of_two: whether scales are rounded up to powers of two.
        cut: over which ranks rows and columns are divided.
        largest: the blocks' largest values, where they are known.
    """
    # A function compiled for a tensor is compiled anew for a parameter, and for a tensor with a gradient.
    x_RC = x_RC.detach()
    if largest is None:
        largest = _largest(x_RC, block.rows or x_RC.size(0), block.columns or x_RC.size(1))
        for extent, groups in zip(block, cut, strict=True):
            for group in groups if extent is None else ():
                torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)
    return Quantized(*_rounded(x_RC, largest, dtype, powers_of_two), largest, block)


def _in_blocks(x_RC: torch.Tensor, per_block: torch.Tensor) -> torch.Tensor:
    """Return a matrix as [blocks down, rows of a block, blocks across, columns of a block]."""
    down, across = per_block.shape
    return x_RC.view(down, x_RC.size(0) // down, across, x_RC.size(1) // across)


# Compiled wherever megatron-core's own small functions are: a GPU then reads the matrix once in each. One piece of code
# takes many sizes, which shortens the first step.
_fused = functools.partial(torch.compile, dynamic=True) if jit_fuser is torch.compile else jit_fuser
_KINDS_OF_MATRICES = 64


def compile_for_all_sizes() -> None:
    """Let torch compile the rounding function as often as a model has kinds of matrices. By itself torch gives a
    function up when it has compiled it eight times, and runs it operator by operator: several passes over memory in
    place of one."""
    if jit_fuser is torch.compile:
        limits: Any = importlib.import_module("torch._dynamo.config")
        limits.recompile_limit = max(limits.recompile_limit, _KINDS_OF_MATRICES)


@_fused
def _largest(x_RC: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    blocks = x_RC.view(x_RC.size(0) // rows, rows, x_RC.size(1) // columns, columns)
    return blocks.abs().amax(dim=(1, 3)).float()


@_fused
def _rounded(
    x_RC: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype, powers_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales; the scale of a block of zeros is 1. A number that is not finite leaves a value or a
    scale that is not finite."""
    limit = torch.finfo(dtype).max
    # Below 2^-126 a GPU may read a scale as 0.
    scales = torch.where(largest == 0, 1.0, (largest / limit).clamp_min(torch.finfo(torch.float32).tiny))
    if powers_of_two:
        # The bits of the mantissa carry into the exponent.
        up = ((scales.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
        scales = torch.where(scales.isfinite(), up, scales)
    blocks = _in_blocks(x_RC.float(), scales) / scales[:, None, :, None]
    return blocks.clamp(-limit, limit).view(x_RC.shape).to(dtype), scales


def product(left_MK: Quantized, right_NK: Quantized, dtype: torch.dtype, *, fast_sums: bool = False) -> torch.Tensor:
    """Return left right^T, [M, N].

    Args:
        left_MK: one factor: where one of the two is in E5M2, this one.
        right_NK: the other factor.
        dtype: dtype of the result.
        fast_sums: whether a Hopper GPU may add with fewer bits than fp32 has.
    """
    if left_MK.values_RC.device.type != "cuda":
        return linear(left_MK.dequantized(), right_NK.dequantized()).to(dtype)
    left, right = _KINDS[left_MK.block], _KINDS[right_NK.block]
    if left == "RowWise" and dtype == torch.float32 and not _sums_rows_in_fp32(left_MK.values_RC.device):
        return product(left_MK, right_NK, torch.bfloat16, fast_sums=fast_sums).float()
    return F.scaled_mm(
        left_MK.values_RC,
        right_NK.values_RC.t(),
        _laid_out(left_MK.scales, left),
        getattr(F.ScalingType, left),
        _laid_out(right_NK.scales, right).t() if right == "RowWise" else _laid_out(right_NK.scales, right),
        getattr(F.ScalingType, right),
        output_dtype=dtype,
        use_fast_accum=fast_sums,
    )


def _sums_rows_in_fp32(device: torch.device) -> bool:
    """Return whether a product with scales for rows can be had in fp32. On GPUs other than Hopper's torch multiplies by
    CUTLASS, whose result had 16 bits in older versions (2.11 says so in its error, 2.15 does not)."""
    return torch.__version__ >= _ROWS_IN_FP32 or torch.cuda.get_device_capability(device)[0] == _HOPPER


def _laid_out(scales: torch.Tensor, kind: str) -> torch.Tensor:
    """Return scales [rows, blocks across] in the order in which cuBLAS reads them (torch's ScaledBlas.cpp)."""
    if kind == "BlockWise1x128":
        return scales.t().contiguous().t()
    if kind == "BlockWise128x128":
        # Four blocks of the sum at a time.
        return F.pad(scales, (0, -scales.size(1) % 4)).contiguous().t()
    return scales.contiguous()
