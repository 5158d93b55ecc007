"""Computes rotary position embedding, whose scaling takes its constants as values.

megatron-core has Llama 3.1's scaling for an original context of 8,192 positions and the factors 1 and 4 alone, and
moves the frequencies to a GPU whatever the device is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from megatron_ext.config.derived.rank_order import context_chunks
from megatron_ext.device.triton import kernel_choice
from megatron_ext.parts.attention.describe import Attention, Scaling, Temperature


class ScaledRotaryEmbedding(RotaryEmbedding):
    """Computes angles of rotation for every position (Su et al. 2021, RoFormer, equation 15), in layers with this
    attention."""

    def __init__(self, attention: Attention, config: TransformerConfig, pg_collection: ProcessGroupCollection) -> None:
        positions = attention.positions
        assert positions is not None, "position changes nothing in these layers"
        is_rotary = not isinstance(positions, Temperature)
        super().__init__(
            kv_channels=positions.channels(attention.rotary_size),
            rotary_percent=1.0,
            rotary_base=positions.base if is_rotary else 1.0,  # pyright: ignore[reportArgumentType]
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=pg_collection.cp,
        )
        self.positions, self.interleaved = positions, is_rotary and positions.interleaved
        self.scaling = positions.scaling if is_rotary else None
        if is_rotary and self.scaling is not None:
            self.inv_freq = scaled_inverse_frequencies(self.inv_freq, self.scaling, positions.base)

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Return angles in radians, [positions, 1, 1, rotated channels]; the two channels of a pair have the same."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        twice = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((angles, angles), dim=-1)
        return twice[:, None, None, :]


class RotaryTable(ScaledRotaryEmbedding):
    """Holds cosines and sines of the angles, computed once for a sequence length, as `rotate` takes them.

    Args:
        others: attention of layers that rotate in other ways. Their tables lie next to this one, in one tensor, along
            its channels: each layer reads its own (`parts.stack.rotary_tables`).
    """

    def __init__(
        self,
        attention: Attention,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        others: Sequence[Attention] = (),
    ) -> None:
        super().__init__(attention, config, pg_collection)
        if attention.rotary is not None and attention.rotary.of_queries is not None:
            others = (replace(attention, rotary=None, temperature=attention.rotary.of_queries), *others)
        self.others = torch.nn.ModuleList(RotaryTable(other, config, pg_collection) for other in others)
        self.length = 1.0 if self.scaling is None else self.scaling.of_table
        whole = attention.rotary is not None and attention.rotary.percent == 1.0
        self.dtype, self.turns_halves = config.params_dtype, whole and not self.interleaved
        self.chunks = context_chunks(pg_collection.cp.rank(), pg_collection.cp.size())
        self.cp_group: Any = None  # else megatron-core would divide the table, along another dimension

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Return cosines, then sines, [2, this rank's positions, rotated channels / 2]."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        # A table for one token is made in vain: such a pass takes its angles from `at`.
        if sum(self.chunks) > 1 and max_seq_len % (sum(self.chunks) + 1) == 0:
            angles = torch.cat([angles.chunk(sum(self.chunks) + 1)[chunk] for chunk in self.chunks])
        return self._beside([self._table(angles), *(other.get_emb(max_seq_len, offset) for other in self._others)])

    def at(self, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the table for positions [B, S] that differ from sample to sample: [2, B, 1, S, rotated channels /
        2]."""
        inverse = self.inv_freq.to(position_ids.device)
        own = self._table(position_ids.to(inverse.dtype)[:, None, :, None] * inverse)
        return self._beside([own, *(other.at(position_ids) for other in self._others)])

    def at_token(self, positions_B1: torch.Tensor) -> "TokenAngles | torch.Tensor":
        """Return the angles that rotate the heads of one token of each row; where the channels are not all rotated, in
        two halves, they are a table of one position."""
        if not self.turns_halves or len(self.others) > 0:
            return self.at(positions_B1)
        inverse = self.inv_freq.to(positions_B1.device)
        cosines, sines = self._table(positions_B1.to(inverse.dtype)[None, :, :, None] * inverse)
        return TokenAngles(torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1))

    @property
    def _others(self) -> "list[RotaryTable]":
        return list(self.others)  # pyright: ignore[reportReturnType]

    @staticmethod
    def _beside(tables: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(tables, dim=-1) if len(tables) > 1 else tables[0]

    def _table(self, angles: torch.Tensor) -> torch.Tensor:
        if isinstance(self.positions, Temperature):
            # The angles of one pair at base 1 are the positions. 16 bits alone would round away how the factor grows.
            steps = torch.floor((angles + self.positions.first) / self.positions.step)
            factor = 1.0 + self.positions.scale * torch.log1p(steps)
            rounded = factor.to(self.dtype)
            return torch.stack((rounded, (factor - rounded).to(self.dtype)))
        table = torch.stack((angles.cos(), angles.sin()))
        return (table if self.length == 1.0 else table * self.length).to(self.dtype)


@dataclass(frozen=True)
class TokenAngles:
    """Turns queries and keys of one token of each row together, in as few operations as possible: a layer's time for a
    single token is the time of its calls."""

    cosines_1B1D: torch.Tensor
    sines_1B1D: torch.Tensor
    """The sines, negative for the first half of the channels."""

    def turned(self, query_1BHD: torch.Tensor, key_1BGD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return both as `rotate` would, without gradients."""
        heads = torch.cat((query_1BHD, key_1BGD), dim=2)
        swapped = heads.roll(heads.size(-1) // 2, -1)
        turned = torch.addcmul(heads * self.cosines_1B1D, swapped, self.sines_1B1D)
        return turned.split((query_1BHD.size(2), key_1BGD.size(2)), dim=2)


def heated(query_BHSD: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return queries times the factor of their position (`Temperature`), which is the sum of the table's two parts."""
    return (query_BHSD * table.float().sum(dim=0)).to(query_BHSD.dtype)


def rotate(
    x_BHSD: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False, by_token: bool = False
) -> torch.Tensor:
    """Rotate pairs of the first channels by their position's angles.

    Args:
        x_BHSD: queries or keys; channels beyond twice the table's are left alone.
        table: from `RotaryTable`.
        interleaved: whether pair i is (channel 2i, channel 2i + 1), and not (channel i, channel i + half).
        by_token: whether a GPU's kernel writes a token's heads one after another, [S, B, H, D].
    Returns:
        A tensor of the same shape, else contiguous.
    """
    if torch.compiler.is_compiling():
        return rotate_reference(x_BHSD, table, interleaved=interleaved)
    if kernel_choice.take(x_BHSD):
        from megatron_ext.device.triton import rotary

        return rotary.rotate(x_BHSD, table, interleaved=interleaved, by_token=by_token)
    if not torch.is_grad_enabled():
        return _turn(x_BHSD, table, 1, interleaved)
    return _Rotation.apply(x_BHSD, table, interleaved)  # pyright: ignore[reportReturnType]


def split_and_rotate(
    mixed_SBGM: torch.Tensor,
    heads_per_group: int,
    table: torch.Tensor | None,
    *,
    interleaved: bool = False,
    by_token: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries [B, H, S, D], keys and values [B, G, S, D], the first two rotated as `rotate` does.

    They are contiguous where something is rotated, and else views where they can be.

    Args:
        mixed_SBGM: the product that has them all: of each of G groups its queries' heads, its key and its value.
        heads_per_group: query heads of a group.
        table: from `RotaryTable`; None to rotate nothing.
        interleaved, by_token: see `rotate`.
    """
    if kernel_choice.take(mixed_SBGM):
        from megatron_ext.device.triton import rotary

        channels = mixed_SBGM.size(-1) // (heads_per_group + 2)
        return rotary.split_heads(mixed_SBGM, table, channels, interleaved=interleaved, by_token=by_token)
    return _SplitRotation.apply(mixed_SBGM, heads_per_group, table, interleaved)  # pyright: ignore[reportReturnType]


def rotate_reference(x_BHSD: torch.Tensor, table: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Compute `rotate` in the usual operations, for the compiler, which fuses them and their gradients."""
    cosines, sines = table[0], table[1]
    first, second, rest = _pairs(x_BHSD, cosines.size(-1), interleaved)
    turned = first * cosines - second * sines, second * cosines + first * sines
    if interleaved:
        return torch.cat((torch.stack(turned, dim=-1).flatten(-2), rest), dim=-1)
    return torch.cat((*turned, rest), dim=-1)


def _pairs(x: torch.Tensor, half: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of x: the first channel of every pair, the second one, and the channels that are not rotated."""
    rotated, rest = x[..., : 2 * half], x[..., 2 * half :]
    if interleaved:
        return rotated[..., ::2], rotated[..., 1::2], rest
    return rotated[..., :half], rotated[..., half:], rest


class _Rotation(torch.autograd.Function):
    """Rotates channels; the gradient is the rotation back. Written out, both take four operations in place of some
    twenty."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, table: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.save_for_backward(table)
        ctx.interleaved = interleaved
        return _turn(x, table, 1, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (table,) = ctx.saved_tensors
        return _turn(grad, table, -1, ctx.interleaved), None, None


class _SplitRotation(torch.autograd.Function):
    """Splits and rotates. Its gradient is one tensor, into which the gradients of queries, keys and values are rotated
    back: three separate ones would have to be concatenated and copied into its layout."""

    @staticmethod
    def forward(
        ctx: Any, mixed: torch.Tensor, heads_per_group: int, table: torch.Tensor | None, interleaved: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(table)
        ctx.shape, ctx.heads_per_group, ctx.interleaved = mixed.shape, heads_per_group, interleaved
        queries, key, value = _heads(mixed, heads_per_group)
        if table is None:
            return queries.flatten(1, 2), key, value
        turned_queries, turned_key = mixed.new_empty(queries.shape), mixed.new_empty(key.shape)
        _turn_into(turned_queries, queries, _of_groups(table), 1, interleaved)
        _turn_into(turned_key, key, table, 1, interleaved)
        return turned_queries.flatten(1, 2), turned_key, value.contiguous()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, for_queries: torch.Tensor, for_key: torch.Tensor, for_value: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        (table,) = ctx.saved_tensors
        for_mixed = for_queries.new_empty(ctx.shape)
        queries, key, value = _heads(for_mixed, ctx.heads_per_group)
        _turn_into(queries, for_queries.view(queries.shape), _of_groups(table), -1, ctx.interleaved)
        _turn_into(key, for_key, table, -1, ctx.interleaved)
        value.copy_(for_value)
        return for_mixed, None, None, None


def _heads(mixed_SBGM: torch.Tensor, heads_per_group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views: the queries of each group, [B, G, heads, S, D], its key and its value, [B, G, S, D]."""
    heads_BGHSD = mixed_SBGM.unflatten(-1, (heads_per_group + 2, -1)).permute(1, 2, 3, 0, 4)
    return heads_BGHSD[:, :, :heads_per_group], heads_BGHSD[:, :, -2], heads_BGHSD[:, :, -1]


def _of_groups(table: torch.Tensor | None) -> torch.Tensor | None:
    """Return the table for the heads of groups, which have a dimension more; one of samples is [2, B, 1, S, ...]."""
    return table.unsqueeze(2) if table is not None and table.dim() == 5 else table


def _turn(x: torch.Tensor, table: torch.Tensor, direction: int, interleaved: bool) -> torch.Tensor:
    turned = x.new_empty(x.shape)
    _turn_into(turned, x, table, direction, interleaved)
    return turned


def _turn_into(
    turned: torch.Tensor, x: torch.Tensor, table: torch.Tensor | None, direction: int, interleaved: bool
) -> None:
    if table is None:
        turned.copy_(x)
        return
    cosines, sines = table[0], table[1]
    half = cosines.size(-1)
    first, second, rest = _pairs(x, half, interleaved)
    turned_first, turned_second, turned_rest = _pairs(turned, half, interleaved)
    torch.mul(first, cosines, out=turned_first).addcmul_(second, sines, value=-direction)
    torch.mul(second, cosines, out=turned_second).addcmul_(first, sines, value=direction)
    if rest.size(-1):
        turned_rest.copy_(rest)


def scaled_inverse_frequencies(inverse_frequencies: torch.Tensor, scaling: Scaling, base: float) -> torch.Tensor:
    """Scale the rotary frequencies (Hugging Face's modeling_rope_utils).

    Llama 3.1 mixes stretched and unstretched frequencies linearly in the number of turns in the original context; YaRN
    (arXiv:2309.00071, section 3.2) linearly in the index of the pair.

    Args:
        inverse_frequencies: [rotated channels / 2], radians per position.
        scaling: its kind and numbers.
        base: RoPE base of the frequencies.
    Returns:
        A new tensor of the same shape and dtype.
    """
    factor = inverse_frequencies.new_tensor(scaling.factors)
    if scaling.kind in ("linear", "longrope"):
        return inverse_frequencies / factor
    original, slow, fast = scaling.original_positions, scaling.slow, scaling.fast
    if scaling.kind == "llama3":
        turns = original * inverse_frequencies / (2.0 * math.pi)
        unscaled = ((turns - slow) / max(fast - slow, 1e-9)).clamp(0.0, 1.0)
        return unscaled * inverse_frequencies + (1.0 - unscaled) * inverse_frequencies / factor
    pairs = len(inverse_frequencies)
    low, high = (pairs * math.log(original / (turns * 2.0 * math.pi)) / math.log(base) for turns in (fast, slow))
    if scaling.rounds:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    ramp = torch.arange(pairs, dtype=torch.float32, device=inverse_frequencies.device) - low
    stretched = (ramp / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    return inverse_frequencies * (1.0 - stretched) + inverse_frequencies / factor * stretched
