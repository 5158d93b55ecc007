"""Multiplies quantized matrices. On a GPU the product is one of torch's `scaled_mm`, chosen by the formats of the two
factors (`KERNELS`). Elsewhere the same numbers are multiplied and added in fp32, in the order of the processor's
library for matrix products, as without few bits.

Shapes: M and N rows of the two factors of a product, K columns of both.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from megatron_ext.device.kernels import linear
from megatron_ext.plugins.low_precision.formats import E2M1, E4M3, Block, Recipe
from megatron_ext.plugins.low_precision.quantize import Quantized, packed


class Kernel(NamedTuple):
    """Scales that torch's kernels take of one factor, and the GPUs that have them."""

    kind: str
    """torch's name of the blocks."""

    capability: tuple[int, int]
    """Least compute capability."""

    below: int = 99
    """Major compute capability from which on GPUs have no such kernel any more."""

    is_grouped: bool = False
    """Whether torch multiplies groups of such factors, both in E4M3, in one call."""


_ADA, _HOPPER, _BLACKWELL = (8, 9), (9, 0), (10, 0)
KERNELS: dict[tuple[Block, str], Kernel] = {
    (Block(None, None), "fp32"): Kernel("TensorWise", _ADA),
    (Block(1, None), "fp32"): Kernel("RowWise", _ADA, is_grouped=True),
    (Block(1, 128), "power of two"): Kernel("BlockWise1x128", _HOPPER, 10),
    (Block(128, 128), "power of two"): Kernel("BlockWise128x128", _HOPPER, 10),
    (Block(1, 32), "e8m0 up"): Kernel("BlockWise1x32", _BLACKWELL, is_grouped=True),
    (Block(1, 32), "e8m0 down"): Kernel("BlockWise1x32", _BLACKWELL),
    (Block(1, 16), "e4m3"): Kernel("BlockWise1x16", _BLACKWELL),
    (Block(16, 16), "e4m3"): Kernel("BlockWise1x16", _BLACKWELL),
}
"""Kernels of torch by block and type of the scales."""

_ROWS_IN_FP32 = "2.15"
"""A version of torch."""


def lacks(recipe: Recipe, capability: tuple[int, int], name: str) -> str | None:
    """Return why a GPU of this compute capability has no kernels for a recipe; None where it has them."""
    here = f"{name} has compute capability {capability[0]}.{capability[1]}"
    formats = [format for pair in recipe for format in pair]
    kernels = [KERNELS[format.block, format.scale] for format in formats]
    if capability < _ADA:
        return f"FP8 needs compute capability 8.9 or more, and {here}"
    least, below = max(one.capability for one in kernels), min(one.below for one in kernels)
    if not least <= capability < (below, 0):
        if least == _HOPPER:
            return f"scales for blocks need compute capability 9.0 (Hopper), and {here}"
        what = "FP4" if any(format.element is E2M1 for format in formats) else "blocks of 32"
        return f"{what} need{'s' * (what == 'FP4')} compute capability 10.0 (Blackwell) or more, and {here}"
    return None


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
    left, right = (KERNELS[one.format.block, one.format.scale].kind for one in (left_MK, right_NK))
    if left == "RowWise" and dtype == torch.float32 and not _sums_rows_in_fp32(left_MK.values_RC.device):
        return product(left_MK, right_NK, torch.bfloat16, fast_sums=fast_sums).float()
    if left in _SWIZZLED and dtype == torch.float32:
        return product(left_MK, right_NK, torch.bfloat16).float()
    left_scales, right_scales = _laid_out(left_MK, left), _laid_out(right_NK, right)
    return F.scaled_mm(
        _values(left_MK),
        _values(right_NK).t(),
        left_scales,
        _kinds(left),
        [right_scales[0].t()] if right == "RowWise" else right_scales,
        _kinds(right),
        **({"swizzle_a": _swizzles(left), "swizzle_b": _swizzles(right)} if left in _SWIZZLED else {}),
        output_dtype=dtype,
        use_fast_accum=fast_sums,
    )


def products(
    lefts: Sequence[Quantized],
    rights: Sequence[Quantized],
    dtype: torch.dtype,
    *,
    by_sum: bool = False,
    fast_sums: bool = False,
) -> Sequence[torch.Tensor]:
    """Return the products left right^T of groups, one by one; on a GPU in one call, where torch has it for the formats.

    Args:
        by_sum: whether groups differ in the number of columns, which are summed over, and not in the rows of the left.
        fast_sums: as for `product`.
    """
    if not lefts or not _are_grouped((lefts[0], rights[0])):
        return [product(left, right, dtype, fast_sums=fast_sums) for left, right in zip(lefts, rights, strict=True)]
    kind = KERNELS[lefts[0].format.block, lefts[0].format.scale].kind
    sizes = [one.values_RC.size(1 if by_sum else 0) for one in lefts]
    ends = torch.tensor(sizes, device=lefts[0].values_RC.device).cumsum(0, dtype=torch.int32)
    left = torch.cat([one.values_RC for one in lefts], 1 if by_sum else 0)
    right = torch.cat([one.values_RC for one in rights], 1).t() if by_sum else _stacked(rights).transpose(1, 2)
    left_scales, right_scales = (torch.cat([_grouped_scales(one, kind) for one in each]) for each in (lefts, rights))
    if kind in _SWIZZLED:  # the tiles of one group after the tiles of another
        rows = -(-left.size(0) // 128) * 128 if by_sum else left_scales.numel() // (-(-left.size(1) // 128) * 4)
        left_scales = left_scales.view(rows, -1)
        right_scales = right_scales.view(-(-right.size(1) // 128) * 128 if by_sum else len(rights), -1)
    elif not by_sum:
        right_scales = right_scales.view(len(rights), -1)
    both = _swizzles(kind) if kind in _SWIZZLED else None
    functional: Any = F  # the types of 2.15 do not know it
    found = functional.scaled_grouped_mm(
        left,
        right,
        left_scales,
        _kinds(kind),
        right_scales,
        _kinds(kind),
        swizzle_a=both,
        swizzle_b=both,
        offs=ends,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast_sums,
    ).to(dtype)
    return list(found) if by_sum else found.split(sizes)


def _are_grouped(pair: Sequence[Quantized]) -> bool:
    grouped = (KERNELS[one.format.block, one.format.scale].is_grouped for one in pair)
    return pair[0].values_RC.device.type == "cuda" and all(grouped) and all(one.format.element is E4M3 for one in pair)


def _stacked(matrices: Sequence[Quantized]) -> torch.Tensor:
    return torch.stack([one.values_RC for one in matrices])


def _grouped_scales(x: Quantized, kind: str) -> torch.Tensor:
    return _laid_out(x, kind)[0].flatten()


_SWIZZLED = ("BlockWise1x32", "BlockWise1x16")


def _kinds(kind: str) -> Any:
    kinds = [getattr(F.ScalingType, kind)]
    return [*kinds, F.ScalingType.TensorWise] if kind == "BlockWise1x16" else kinds


def _swizzles(kind: str) -> Any:
    swizzles = [F.SwizzleType.SWIZZLE_32_4_4]
    return [*swizzles, F.SwizzleType.NO_SWIZZLE] if kind == "BlockWise1x16" else swizzles


def _values(x: Quantized) -> torch.Tensor:
    return packed(x.values_RC) if x.format.element is E2M1 else x.values_RC


def _sums_rows_in_fp32(device: torch.device) -> bool:
    """Return whether a product with scales for rows can be had in fp32. On GPUs other than Hopper's torch multiplies by
    CUTLASS, whose result had 16 bits in older versions (2.11 says so in its error, 2.15 does not)."""
    return torch.__version__ >= _ROWS_IN_FP32 or torch.cuda.get_device_capability(device)[0] == _HOPPER[0]


def _laid_out(x: Quantized, kind: str) -> list[torch.Tensor]:
    """Return scales [rows, blocks across] in the order in which cuBLAS reads them (torch's ScaledBlas.cpp)."""
    scales = x.scales
    if kind == "BlockWise1x128":
        return [scales.t().contiguous().t()]
    if kind == "BlockWise128x128":
        # Four blocks of the sum at a time.
        return [F.pad(scales, (0, -scales.size(1) % 4)).contiguous().t()]
    if kind not in _SWIZZLED:
        return [scales.contiguous()]
    rows = scales.repeat_interleave(x.format.block.rows or 1, 0)
    tiled = _tiled(rows)
    if x.tensor_scale is None:
        # The bits of the exponent: torch's cast would round, and makes 1 of negative numbers.
        return [(tiled.view(torch.int32) >> 23).to(torch.uint8).view(torch.float8_e8m0fnu)]
    return [tiled.to(torch.float8_e4m3fn), x.tensor_scale]


def _tiled(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in the tiles of 128 rows by 4 blocks that Blackwell's matrix units read: 32 rows, of each its
    four neighbours 32 rows apart, of each 4 blocks (cuBLAS, "1D Block Scaling Factors Layout")."""
    down, across = scales.shape
    whole = F.pad(scales, (0, -across % 4, 0, -down % 128))
    tiles = whole.view(whole.size(0) // 128, 4, 32, whole.size(1) // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().flatten()
