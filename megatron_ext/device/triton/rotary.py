"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864, equation 15), read where queries and keys lie.

`split_heads` takes the product of a layer's query, key and value weights as it is, and writes queries, keys and values,
the first two rotated: every number is read once and written once. Each head's rows lie one after another, or each
token's heads: then torch's attention writes its context in that order too, which the next product reads without a
copy. The gradient goes the same way back. `rotate` does it for heads that were normalized in between.

Shapes: S sequence, B batch, H query heads, G key/value heads, D channels of a head.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_ext.device.triton.kernel_choice import launch

_TILE = 2048
"""Elements of a program's tile."""

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def split_heads(
    packed_SBGC: torch.Tensor,
    table: torch.Tensor | None,
    channels: int,
    *,
    interleaved: bool = False,
    by_token: bool = False,
) -> Heads:
    """Return queries [B, H, S, D], keys and values [B, G, S, D]; queries and keys are rotated.

    Args:
        packed_SBGC: each of the G groups has its queries, its key and its value, [S, B, G, (H / G + 2) * D].
        table: from `parts.attention.rope.RotaryTable`, [2, S, half] or [2, B, 1, S, half]; None rotates nothing.
        channels: D.
        interleaved: whether pair i is (channel 2i, channel 2i + 1), and not (channel i, channel i + half).
        by_token: whether the results lie in memory as [S, B, heads, D], and not as [B, heads, S, D].
    """
    return _SplitHeads.apply(packed_SBGC, table, channels, interleaved, by_token)  # pyright: ignore[reportReturnType]


def rotate(
    x_BHSD: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False, by_token: bool = False
) -> torch.Tensor:
    """Return `parts.attention.rope.rotate` of heads that may lie in any order; the result lies as `split_heads` has
    it."""
    return _Rotation.apply(x_BHSD, table, interleaved, by_token)  # pyright: ignore[reportReturnType]


def _heads(like: torch.Tensor, sizes: tuple[int, int, int, int], by_token: bool) -> torch.Tensor:
    """Return heads [B, H, S, D] without values."""
    batch, heads, sequence, channels = sizes
    if by_token:
        return like.new_empty(sequence, batch, heads, channels).permute(1, 2, 0, 3)
    return like.new_empty(sizes)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, packed: torch.Tensor, table: torch.Tensor | None, channels: int, interleaved: bool, by_token: bool
    ) -> Heads:
        packed = packed if packed.stride(-1) == 1 else packed.contiguous()
        sequence, batch, groups, width = packed.shape
        queries = width // channels - 2
        numbers = groups * queries, groups, groups
        query, key, value = (_heads(packed, (batch, number, sequence, channels), by_token) for number in numbers)
        _split(packed, (query, key, value), table, interleaved, backward=False)
        ctx.save_for_backward(table)
        ctx.shape, ctx.interleaved = packed.shape, interleaved
        return query, key, value

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (table,) = ctx.saved_tensors
        heads = tuple(grad if grad.stride(-1) == 1 else grad.contiguous() for grad in grads)
        packed = grads[0].new_empty(ctx.shape)
        _split(packed, heads, table, ctx.interleaved, backward=True)  # pyright: ignore[reportArgumentType]
        return packed, None, None, None, None


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor, interleaved: bool, by_token: bool) -> torch.Tensor:
        ctx.save_for_backward(table)
        ctx.interleaved = interleaved
        batch, heads, sequence, channels = x.shape
        turned = _heads(x, (batch, heads, sequence, channels), by_token)
        _turn(x, turned, table, interleaved, backward=False)
        return turned

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (table,) = ctx.saved_tensors
        batch, heads, sequence, channels = grad.shape
        # The norm before it reads its gradient so.
        turned = _heads(grad, (batch, heads, sequence, channels), by_token=True)
        _turn(grad, turned, table, ctx.interleaved, backward=True)
        return turned, None, None, None


def _table(table: torch.Tensor | None, like: torch.Tensor) -> tuple[torch.Tensor, list[int], int]:
    """Return the table, its strides of cosine to sine, of samples and of positions, and its pairs."""
    if table is None:
        return like, [0, 0, 0], 0
    table = table if table.stride(-1) == 1 else table.contiguous()
    samples = table.stride(1) if table.dim() == 5 else 0
    return table, [table.stride(0), samples, table.stride(-2)], table.size(-1)


def _tile(channels: int, pairs: int, interleaved: bool, backward: bool) -> dict[str, Any]:
    block = triton.next_power_of_2(channels)
    tile = {"POSITIONS": max(1, min(64, _TILE // block)), "BLOCK": block, "num_warps": 4}
    return {"CHANNELS": channels, "PAIRS": pairs, "INTERLEAVED": interleaved, "BACKWARD": backward, **tile}


def _split(
    packed: torch.Tensor, heads: Heads, table: torch.Tensor | None, interleaved: bool, *, backward: bool
) -> None:
    sequence, batch, groups, width = packed.shape
    channels = heads[0].size(-1)
    angles, strides, pairs = _table(table, packed)
    tile = _tile(channels, pairs, interleaved, backward)
    per_group = width // channels
    launch(
        split_heads_kernel,
        (triton.cdiv(sequence, tile["POSITIONS"]), groups * per_group, batch),
        *(packed, *heads, angles, sequence, *packed.stride()[:3]),
        *(stride for tensor in heads for stride in tensor.stride()[:3]),
        *strides,
        PER_GROUP=per_group,
        **tile,
    )


def _turn(x: torch.Tensor, turned: torch.Tensor, table: torch.Tensor, interleaved: bool, *, backward: bool) -> None:
    batch, heads, sequence, channels = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    angles, strides, pairs = _table(table, x)
    tile = _tile(channels, pairs, interleaved, backward)
    launch(
        rotate_kernel,
        (triton.cdiv(sequence, tile["POSITIONS"]), heads, batch),
        *(x, turned, angles, sequence, *x.stride()[:3], *turned.stride()[:3], *strides),
        **tile,
    )


@triton.jit
def turned_tile(
    source,
    angles,
    position,
    sequence,
    source_stride,
    sine_stride,
    position_stride,
    turned_channels,
    CHANNELS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Reads rows of one head, [POSITIONS, BLOCK], and turns their first channels, 2 * PAIRS or none."""
    channel = tl.arange(0, BLOCK)[None, :]
    inside = (position < sequence) & (channel < CHANNELS)
    row = source + position.to(tl.int64) * source_stride
    own = tl.load(row + channel, mask=inside, other=0.0).to(tl.float32)
    if PAIRS > 0:
        angle = angles + position.to(tl.int64) * position_stride
        if INTERLEAVED:
            first, second = tl.split(tl.reshape(own, (POSITIONS, BLOCK // 2, 2)))
            pair = tl.arange(0, BLOCK // 2)[None, :]
            turned = (position < sequence) & (2 * pair < turned_channels)
            cosine = tl.load(angle + pair, mask=turned, other=1.0).to(tl.float32)
            sine = tl.load(angle + pair + sine_stride, mask=turned, other=0.0).to(tl.float32)
            if BACKWARD:  # the gradient turns the other way
                sine = -sine
            both = tl.join(first * cosine - second * sine, second * cosine + first * sine)
            own = tl.reshape(both, (POSITIONS, BLOCK))
        else:
            # Each channel by itself, with its pair's other channel read next to it, which is in the cache by then.
            is_second = channel >= PAIRS
            pair = tl.where(is_second, channel - PAIRS, channel)
            other = tl.where(is_second, channel - PAIRS, channel + PAIRS)
            turned = inside & (channel < turned_channels)
            cosine = tl.load(angle + pair, mask=turned, other=1.0).to(tl.float32)
            sine = tl.load(angle + pair + sine_stride, mask=turned, other=0.0).to(tl.float32)
            partner = tl.load(row + other, mask=turned, other=0.0).to(tl.float32)
            # First: a cos - b sin; second: b cos + a sin; the gradient with the other sign.
            sine = tl.where(is_second != BACKWARD, sine, -sine)
            own = own * cosine + partner * sine
    return own, inside


@triton.jit
def split_heads_kernel(
    packed,
    query,
    key,
    value,
    angles,
    sequence,
    packed_s,
    packed_b,
    packed_g,
    query_b,
    query_h,
    query_s,
    key_b,
    key_h,
    key_s,
    value_b,
    value_h,
    value_s,
    angles_sine,
    angles_b,
    angles_s,
    PER_GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Moves some positions of one head from the product to the heads, or back."""
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)[:, None]
    slot, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    group, place = (slot // PER_GROUP).to(tl.int64), slot % PER_GROUP
    within = packed + sample * packed_b + group * packed_g + place * CHANNELS
    if place < PER_GROUP - 2:
        head = query + sample * query_b + (group * (PER_GROUP - 2) + place) * query_h
        head_s = tl.cast(query_s, tl.int64)
    elif place == PER_GROUP - 2:
        head = key + sample * key_b + group * key_h
        head_s = tl.cast(key_s, tl.int64)
    else:
        head = value + sample * value_b + group * value_h
        head_s = tl.cast(value_s, tl.int64)
    angles += sample * angles_b
    if BACKWARD:
        source, source_s, target, target_s = head, head_s, within, tl.cast(packed_s, tl.int64)
    else:
        source, source_s, target, target_s = within, tl.cast(packed_s, tl.int64), head, head_s
    made, inside = turned_tile(
        source,
        angles,
        position,
        sequence,
        source_s,
        angles_sine,
        angles_s,
        tl.where(place < PER_GROUP - 1, 2 * PAIRS, 0),
        CHANNELS,
        PAIRS,
        INTERLEAVED,
        BACKWARD,
        POSITIONS,
        BLOCK,
    )
    channel = tl.arange(0, BLOCK)[None, :]
    tl.store(target + position.to(tl.int64) * target_s + channel, made.to(target.dtype.element_ty), mask=inside)


@triton.jit
def rotate_kernel(
    x,
    turned,
    angles,
    sequence,
    x_b,
    x_h,
    x_s,
    turned_b,
    turned_h,
    turned_s,
    angles_sine,
    angles_b,
    angles_s,
    CHANNELS: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turns some positions of one head."""
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)[:, None]
    head, sample = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    made, inside = turned_tile(
        x + sample * x_b + head * x_h,
        angles + sample * angles_b,
        position,
        sequence,
        x_s,
        angles_sine,
        angles_s,
        2 * PAIRS,
        CHANNELS,
        PAIRS,
        INTERLEAVED,
        BACKWARD,
        POSITIONS,
        BLOCK,
    )
    channel = tl.arange(0, BLOCK)[None, :]
    row = turned + sample * turned_b + head * turned_h + position.to(tl.int64) * turned_s
    tl.store(row + channel, made.to(turned.dtype.element_ty), mask=inside)
