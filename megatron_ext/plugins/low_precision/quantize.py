"""Rounds matrices to a format of few bits (`formats.py`): each block is divided by a scale that brings its largest
number to the element's largest, and rounded.

    x, weight = quantize(x, Format(Block(1, None))), quantize(weight, Format(Block(1, None)))
    y = product(x, weight, torch.bfloat16)          # products.py

A scale is found from the block at each use, without history. Rounding to E4M3 changes a number by at most 2^-4 of
itself, to E5M2 by 2^-3, to E2M1 by 2^-2, or, where it is small, by 2^-10, 2^-17 or 2^-2 scales.

A number that is not finite leaves a number that is not finite in its block's `dequantized` values, in every format, so
that a step's own check sees it: the scale is infinite or NaN, or it is so large that the largest element times the
scale is infinite in fp32.

Shapes: R rows and C columns of a matrix.
"""

import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.jit import jit_fuser
from torch.distributed import ProcessGroup

from megatron_ext.plugins.low_precision.formats import E2M1, E4M3, ROTATED, Element, Format
from megatron_ext.plugins.low_precision.random_numbers import Draw

_E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Quantized(NamedTuple):
    """A matrix in few bits: `values`, each times the scale of its block, and the scale of the tensor, if it has one."""

    values_RC: torch.Tensor
    """In an FP8 type; of E2M1 the codes, sign before magnitude, in the low four bits of bytes."""

    scales: torch.Tensor
    """Scales in fp32, [blocks down, blocks across]."""

    largest: torch.Tensor
    """Largest absolute value of each block before it was rounded, as `scales`."""

    format: Format
    tensor_scale: torch.Tensor | None = None
    """Scale of the whole tensor in fp32, without dimensions."""

    def transposed(self) -> "Quantized":
        """Return the transposed matrix, its values in the order of its own rows."""
        values, turned = self.values_RC.t().contiguous(), self.format.turned
        return Quantized(values, self.scales.t(), self.largest.t(), turned, self.tensor_scale)

    def dequantized(self) -> torch.Tensor:
        """Return the matrix in fp32."""
        values = self.values_RC
        numbers = numbers_of(values) if self.format.element is E2M1 else values.float()
        scales = self.scales if self.tensor_scale is None else self.scales * self.tensor_scale
        return (_in_blocks(numbers, scales) * scales[:, None, :, None]).view(values.shape)


Cut = tuple[Sequence[ProcessGroup], Sequence[ProcessGroup]]
"""The ranks that rows, and columns, of a matrix are divided over; no group where this rank has all."""

WHOLE: Cut = ((), ())


def quantize(
    x_RC: torch.Tensor,
    format: Format,
    *,
    cut: Cut = WHOLE,
    largest: torch.Tensor | None = None,
    draw: Draw | None = None,
    tensor_largest: torch.Tensor | None = None,
) -> Quantized:
    """Return a matrix in few bits.

    Collective where a block, or the scale of a tensor, goes across ranks: they take the largest value of all, so that a
    matrix that is cut gets the scales and values that it has in one piece.

    Args:
        x_RC: a contiguous matrix, whose sides are multiples of the block's.
        cut: over which ranks rows and columns are divided.
        largest: the blocks' largest values, where they are known.
        draw: the random numbers of a format that draws some.
        tensor_largest: the tensor's largest value, without dimensions, where it is known.
    """
    # A function compiled for a tensor is compiled anew for a parameter, and for a tensor with a gradient.
    x_RC, block = x_RC.detach(), format.block
    if format.rotated:
        assert draw is not None, "signs are drawn"
        x_RC = rotated(x_RC, draw.signs(x_RC.device))
    if largest is None:
        largest = largest_of_blocks(x_RC, block.rows or x_RC.size(0), block.columns or x_RC.size(1))
        _find_together(
            largest, [group for extent, groups in zip(block, cut, strict=True) if extent is None for group in groups]
        )
    tensor_scale = None
    if format.has_tensor_scale:
        if tensor_largest is None:
            tensor_largest = largest.amax()
            _find_together(tensor_largest, [group for groups in cut for group in groups])
        whole = tensor_largest / (format.element.largest * E4M3.largest)
        tensor_scale = torch.where(whole == 0, 1.0, whole)
    uniform = None
    if format.stochastic:
        assert draw is not None, "rounding is drawn"
        uniform = draw.uniform(x_RC)
    found = _rounded(x_RC, largest, format.element, format.scale, tensor_scale, uniform)
    return Quantized(*found, largest, format, tensor_scale)


def _find_together(largest: torch.Tensor, groups: Sequence[ProcessGroup]) -> None:
    for group in groups:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)


def _in_blocks(x_RC: torch.Tensor, per_block: torch.Tensor) -> torch.Tensor:
    """Return a matrix as [blocks down, rows of a block, blocks across, columns of a block]."""
    down, across = per_block.shape
    return x_RC.reshape(down, x_RC.size(0) // down, across, x_RC.size(1) // across)


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
def largest_of_blocks(x_RC: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the largest absolute value of each block of so many rows and columns, [blocks down, blocks across]."""
    blocks = x_RC.view(x_RC.size(0) // rows, rows, x_RC.size(1) // columns, columns)
    return blocks.abs().amax(dim=(1, 3)).float()


@_fused
def block_scales(largest: torch.Tensor, element: Element, scale: str) -> torch.Tensor:
    """Return the scales of blocks with these largest values, in a format without a scale of the tensor."""
    return _scales(largest, element, scale, None)[0]


@_fused
def _rounded(
    x_RC: torch.Tensor,
    largest: torch.Tensor,
    element: Element,
    scale: str,
    tensor_scale: torch.Tensor | None = None,
    uniform: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales."""
    scales, divisor, factor = _scales(largest, element, scale, tensor_scale)
    blocks = _in_blocks(x_RC.float(), scales)
    quotients = blocks / divisor[:, None, :, None] if factor is None else blocks * factor[:, None, :, None]
    limited = quotients.clamp(-element.largest, element.largest).view(x_RC.shape)
    if uniform is not None:
        limited = _at_random(limited, element, uniform)
    elif element.bits == E2M1.bits:
        limited = _to_nearest(limited, element)
    if element.bits == E2M1.bits:
        return _codes(limited), scales
    return limited.to(getattr(torch, element.name)), scales


def _scales(
    largest: torch.Tensor, element: Element, scale: str, tensor_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the scales in fp32, what numbers are divided by, and what they are multiplied by instead, where it is so
    in the kernels of a format. The scale of a block of zeros is 1 in fp32, and the smallest in other types."""
    if scale == "e4m3":
        assert tensor_scale is not None
        e4m3 = torch.float8_e4m3fn
        wanted = (largest / element.largest) / tensor_scale
        scales = wanted.clamp(2.0**E4M3.least, E4M3.largest).to(e4m3).float()
        return scales, scales, (1.0 / tensor_scale) / scales
    if scale == "e8m0 down":
        # The exponent's bits, which are all ones for infinities and NaN.
        biased = ((largest.view(torch.int32) >> 23) & 255) - element.exponent
        return *_of_exponent(biased, largest, 2.0**-126), None
    if scale == "e8m0 up":
        bits = (largest / element.largest).view(torch.int32)
        biased = torch.where(bits <= 1 << 22, 0, ((bits + 0x7FFFFF) >> 23).clamp(max=254))
        scales, _ = _of_exponent(biased, largest, 0.0)
        return scales, torch.where(biased == 0, 1.0, scales), None
    # Below 2^-126 a GPU may read a scale as 0.
    scales = torch.where(largest == 0, 1.0, (largest / element.largest).clamp_min(torch.finfo(torch.float32).tiny))
    if scale == "power of two":
        # The bits of the mantissa carry into the exponent.
        up = ((scales.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
        scales = torch.where(scales.isfinite(), up, scales)
    return scales, scales, None


def _of_exponent(biased: torch.Tensor, largest: torch.Tensor, least: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of E8M0, 2^(biased - 127), NaN where `largest` is, and these or at least `least`."""
    biased = biased.clamp(0, 254)
    # 2^-127 is subnormal in fp32.
    scales = torch.where(biased == 0, 2.0**-127, (biased << 23).view(torch.float32))
    scales = torch.where(largest.isnan(), math.nan, scales)
    return scales, scales.clamp_min(least)


def _steps(sizes: torch.Tensor, element: Element) -> torch.Tensor:
    """Return the distances between an element's numbers around these."""
    exponent = ((sizes.view(torch.int32) >> 23) - 127).clamp_min(element.least) - element.mantissa
    return ((exponent + 127) << 23).view(torch.float32)


def _to_nearest(x: torch.Tensor, element: Element) -> torch.Tensor:
    """Return x rounded to the nearest number of the element, ties to the even mantissa."""
    sizes = x.abs()
    steps = _steps(sizes, element)
    return torch.copysign((sizes / steps).round() * steps, x)


def _at_random(x: torch.Tensor, element: Element, uniform: torch.Tensor) -> torch.Tensor:
    """Return x rounded up in size with the probability of the distance from the smaller neighbour, so that the mean
    over `uniform` in [0, 1) is x."""
    sizes = x.abs()
    steps = _steps(sizes, element)
    return torch.copysign((sizes / steps + uniform).floor() * steps, x)


def _codes(x: torch.Tensor) -> torch.Tensor:
    """Return the codes of numbers of E2M1; NaN, whose block has a scale that is not finite, gets the largest."""
    sizes = x.abs().nan_to_num(nan=E2M1.largest)
    codes = torch.where(sizes < 2, 2 * sizes, torch.where(sizes < 4, sizes + 2, sizes / 2 + 4))
    return (codes + 8 * torch.signbit(x)).to(torch.uint8)


def numbers_of(codes: torch.Tensor) -> torch.Tensor:
    """Return the numbers of E2M1 in fp32 that codes stand for."""
    table = torch.tensor([*_E2M1_NUMBERS, *(-number for number in _E2M1_NUMBERS)], device=codes.device)
    return table[codes.long()]


def packed(codes_RC: torch.Tensor) -> torch.Tensor:
    """Return codes of E2M1 two to a byte, the first in the low bits, [R, C / 2] of torch's type."""
    return (codes_RC[:, ::2] | codes_RC[:, 1::2] << 4).view(torch.float4_e2m1fn_x2)


def rotated(x_RC: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return each 16 columns times the signs, and times the Hadamard matrix over its root, in fp32.

    Additions in pairs, not a matrix product, whose sums could depend on the number of rows.
    """
    x = x_RC.float().view(x_RC.size(0), -1, ROTATED) * signs
    for half in (1, 2, 4, 8):
        pairs = x.view(x_RC.size(0), -1, 2, half)
        first, second = pairs[:, :, :1], pairs[:, :, 1:]
        x = torch.cat((first + second, first - second), dim=2)
    return x.reshape(x_RC.shape) / math.sqrt(ROTATED)
