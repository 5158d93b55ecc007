"""Computes the part of a whole parameter that each tensor-parallel rank holds.

Tensor parallelism divides one dimension of a parameter into equal parts, in the order of the ranks. With a stride of
n the whole is n tensors, one above the other, each of which is divided (2 for SwiGLU: gate and up projection):

    whole     g0 g1 g2 g3 u0 u1 u2 u3        of two ranks, stride 2
    rank 0    g0 g1 u0 u1
    rank 1    g2 g3 u2 u3
"""

from typing import NamedTuple

from megatron_ext.parts.catalogue import Parameter


class Piece(NamedTuple):
    """Consecutive indices of the divided dimension that lie one after another in the whole and in the shard."""

    start: int
    """Index of the first of them in the whole."""
    in_shard: int
    """Index of the first of them in the rank's shard."""
    size: int


def pieces(length: int, stride: int, rank: int, ranks: int) -> list[Piece]:
    """Return the pieces of a dimension of `length` indices that a rank holds: as many as the stride, in shard order."""
    size = length // (ranks * stride)
    return [Piece((part * ranks + rank) * size, part * size, size) for part in range(stride)]


def rows(parameter: Parameter, rank: int, ranks: int) -> list[Piece]:
    """Return the rows (first dimension) of which a rank's shard consists; all where another dimension is divided."""
    length = parameter.shape[0]
    return pieces(length, parameter.tp_stride, rank, ranks) if parameter.tp_dim == 0 else [Piece(0, 0, length)]


def columns(parameter: Parameter, rank: int, ranks: int) -> slice:
    """Return the columns (second dimension) of which a rank's shard consists, of all of its rows."""
    if parameter.tp_dim != 1:
        return slice(None)
    [piece] = pieces(parameter.shape[1], parameter.tp_stride, rank, ranks)
    return slice(piece.start, piece.start + piece.size)
