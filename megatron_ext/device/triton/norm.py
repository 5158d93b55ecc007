"""RMSNorm and LayerNorm, of a sum with the residual stream or of x alone, and their gradients.

Zhang and Sennrich 2019 (arXiv:1910.07467), equation 4; Ba et al. 2016 (arXiv:1607.06450), equation 4.

The forward pass keeps x and two numbers a row. The gradient of the weight is a sum over all rows: a fixed number of
programs each sum every n-th tile of rows, and torch adds their sums, so that the bits do not depend on which program
was first, nor on the GPU.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_ext.device.triton.kernel_choice import launch

_TILE = 4096
"""Elements that a program holds at a time, where a row is shorter."""
_PROGRAMS = 384
"""Programs that sum the gradient of the weight: about three on each multiprocessor of an H200."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension. x: [..., hidden], weight: [hidden]."""
    return _Norm.apply(x, weight, None, eps)  # pyright: ignore[reportReturnType]


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Return (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension."""
    return _Norm.apply(x, weight, bias, eps)  # pyright: ignore[reportReturnType]


def norm_of_sum(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of x + residual (RMSNorm without a bias, LayerNorm with one), and the sum itself, rounded as the
    norm sees it. x, residual: [..., hidden], of one dtype."""
    return _NormOfSum.apply(x, residual, weight, bias, eps)  # pyright: ignore[reportReturnType]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        normed, statistics, rows = _forward(x, None, weight, bias, eps)
        ctx.save_for_backward(rows, statistics, weight)
        ctx.centered = bias is not None
        return normed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        for_x, for_weight, for_bias = _backward(ctx, grad, None)
        return for_x.view(grad.shape), for_weight, for_bias, None


class _NormOfSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, statistics, total = _forward(x, residual, weight, bias, eps)
        ctx.save_for_backward(total, statistics, weight)
        ctx.centered = bias is not None
        ctx.set_materialize_grads(False)
        return normed, total

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor | None, of_sum: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return of_sum, of_sum, None, None, None
        for_sum, for_weight, for_bias = _backward(ctx, grad, of_sum)
        for_sum = for_sum.view(grad.shape)
        return for_sum, for_sum, for_weight, for_bias, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Return x as [rows, hidden]: a view where its rows are evenly spaced, else a copy."""
    rows = x.reshape(-1, x.size(-1))
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _tile(columns: int) -> dict[str, int]:
    """Return the sizes of a program's tile, and its warps."""
    block = triton.next_power_of_2(columns)
    rows = max(1, _TILE // block)
    return {"ROWS": rows, "COLUMNS": block, "num_warps": min(16, max(4, rows * block // 1024))}


def _forward(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the norm; mean and inverse deviation, [2, rows]; and the normalized input: the sum, or x as rows."""
    normed, given = x.new_empty(x.shape), _rows(x)
    rows, columns = given.shape
    total = given if residual is None else x.new_empty(x.shape)
    others = None if residual is None else _rows(residual)
    statistics = x.new_empty(2, rows, dtype=torch.float32)
    tile = _tile(columns)
    launch(
        norm_forward,
        (triton.cdiv(rows, tile["ROWS"]),),
        *(given, given if others is None else others, weight, weight if bias is None else bias),
        *(normed, total, statistics, rows, columns, given.stride(0), 0 if others is None else others.stride(0), eps),
        HAS_RESIDUAL=others is not None,
        CENTERED=bias is not None,
        **tile,
    )
    return normed, statistics, total


def _backward(
    ctx: Any, grad: torch.Tensor, of_sum: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the gradients of the normalized input, [rows, hidden], of the weight and of the bias."""
    x, statistics, weight = ctx.saved_tensors
    x = _rows(x)
    rows, columns = x.shape
    grad, others = _rows(grad), None if of_sum is None else _rows(of_sum)
    tile = _tile(columns)
    programs = min(_PROGRAMS, triton.cdiv(rows, tile["ROWS"]))
    for_x = x.new_empty(rows, columns)
    partial = x.new_empty(1 + ctx.centered, programs, columns, dtype=torch.float32)
    launch(
        norm_backward,
        (programs,),
        *(grad, grad if others is None else others, x, weight, statistics, for_x, partial),
        *(rows, columns, grad.stride(0), 0 if others is None else others.stride(0), x.stride(0)),
        HAS_RESIDUAL=others is not None,
        CENTERED=ctx.centered,
        **tile,
    )
    sums = partial.sum(1).to(weight.dtype)
    return for_x, sums[0], sums[1] if ctx.centered else None


@triton.jit
def norm_forward(
    x,
    residual,
    weight,
    bias,
    normed,
    total,
    statistics,
    rows,
    columns,
    x_stride,
    residual_stride,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Normalizes a tile of rows. `normed` and `total` are contiguous; `statistics` is [2, rows] in fp32."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + row * columns + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if CENTERED:
        mean = tl.sum(values, axis=1, keep_dims=True) / columns
        tl.store(statistics + row, mean, mask=row < rows)
        values = tl.where(column < columns, values - mean, 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(values * values, axis=1, keep_dims=True) / columns + eps)
    tl.store(statistics + rows + row, inverse, mask=row < rows)
    result = values * inverse * tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    if CENTERED:
        result += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(normed + row * columns + column, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward(
    grad,
    of_sum,
    x,
    weight,
    statistics,
    for_x,
    partial,
    rows,
    columns,
    grad_stride,
    of_sum_stride,
    x_stride,
    HAS_RESIDUAL: tl.constexpr,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Writes the gradient of every n-th tile of rows, and this program's sums for the weight and the bias.

    The components that would change the norm of x, or its mean, have no effect and are removed. `of_sum` is the
    gradient that x gets from its other use.
    """
    column = tl.arange(0, COLUMNS)[None, :]
    scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
    for_weight = tl.zeros((COLUMNS,), tl.float32)
    for_bias = tl.zeros((COLUMNS,), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        given = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(statistics + rows + row, mask=row < rows, other=0.0)
        if CENTERED:
            values -= tl.load(statistics + row, mask=row < rows, other=0.0)
        normal = tl.where(inside, values * inverse, 0.0)
        weighted = given * scale
        result = weighted - normal * (tl.sum(weighted * normal, axis=1, keep_dims=True) / columns)
        if CENTERED:
            result -= tl.sum(weighted, axis=1, keep_dims=True) / columns
        result *= inverse
        if HAS_RESIDUAL:
            result += tl.load(of_sum + row * of_sum_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(for_x + row * columns + column, result.to(for_x.dtype.element_ty), mask=inside)
        for_weight += tl.sum(given * normal, axis=0)
        for_bias += tl.sum(given, axis=0)
    channel = tl.arange(0, COLUMNS)
    own = partial + tl.program_id(0) * columns + channel
    tl.store(own, for_weight, mask=channel < columns)
    if CENTERED:
        tl.store(own + tl.num_programs(0) * columns, for_bias, mask=channel < columns)
