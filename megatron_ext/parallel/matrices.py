"""Whole matrices whose parts ranks divide: where a rank's part lies, and the exchange by which each matrix is computed
once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch.distributed import ProcessGroup

from megatron_ext.parallel.rows import RowShard


@dataclass(frozen=True)
class Matrix:
    """Place of the part that a rank updates, in a matrix or in a stack of experts' matrices. Tensors that are updated
    have it as their attribute `matrix`."""

    shape: tuple[int, ...]
    """Shape of a tensor-parallel rank's part: [rows, columns], or [experts, rows, columns]."""

    sections: tuple[int, ...] = ()
    """Rows of each matrix of a repeating group that lie one above another (`Parameter.sections`)."""

    divided: int | None = None
    """The dimension, -2 (rows) or -1 (columns), that the ranks of `group` divide; None: each rank has all of it."""

    group: ProcessGroup | None = None

    rows: RowShard | None = None
    """The rows that this data-parallel rank updates; None for all of them."""

    @property
    def is_cut(self) -> bool:
        """Whether data-parallel ranks have rows of one matrix. Of a stack they have whole ones."""
        return self.rows is not None and self.rows.group is not None and len(self.shape) == 2

    def size(self, dim: int) -> int:
        """Return the number of rows (-2) or columns (-1) of the whole matrix."""
        divided = self.group is not None and self.divided == dim
        return self.shape[dim] * (self.group.size() if divided and self.group is not None else 1)

    def summed(self, x: torch.Tensor, *dims: int) -> torch.Tensor:
        """Return sums over dimensions (-2, -1) of whole matrices, which stay with size 1. Collective over the ranks
        that divide them.

        Args:
            x: cut as this rank's part is, or of size 1 in dimensions that are not summed.
        """
        sums = x.sum(dims, keepdim=True)
        if self.group is not None and self.divided in dims:
            torch.distributed.all_reduce(sums, group=self.group)
        if self.is_cut and self.rows is not None and -2 in dims:
            torch.distributed.all_reduce(sums, group=self.rows.group)
        return sums


def matrix_of(updated: torch.Tensor) -> Matrix:
    """Return the `Matrix` of a tensor that is updated; a tensor without one is a whole matrix."""
    return getattr(updated, "matrix", None) or Matrix(tuple(updated.shape))


def on_owners(
    parts: Sequence[torch.Tensor],
    shards: Sequence[RowShard],
    compute: Callable[[list[int], list[torch.Tensor]], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Return this rank's rows of the results of `compute` for whole matrices, each of which one rank gathers and
    computes. Collective.

    Args:
        parts: this rank's rows of each matrix; `shards` has their places.
        compute: takes the indices of this rank's matrices and the matrices; returns as many results of the same shapes.
    """
    group = shards[0].group
    assert group is not None, "the matrices are divided"
    ends = torch.tensor([(shard.first, shard.stop) for shard in shards], device=parts[0].device).flatten()
    of_ranks = ends.new_empty(group.size() * len(ends))
    torch.distributed.all_gather_into_tensor(of_ranks, ends, group=group)
    rows = of_ranks.view(group.size(), len(shards), 2).tolist()
    shapes = [(max(stop for _, stop in ends), part.size(1)) for *ends, part in zip(*rows, parts, strict=True)]
    owned = _shared_out([height * width * min(height, width) for height, width in shapes], group.size())
    own = owned[group.rank()]
    wholes = [parts[0].new_empty(shapes[number]) for number in own]
    places = [[whole[slice(*ends[number])] for number, whole in zip(own, wholes, strict=True)] for ends in rows]
    pieces = _swap([[parts[number] for number in numbers] for numbers in owned], places, group)
    for place, piece in zip(chain(*places), pieces, strict=True):
        place.copy_(piece)
    results = compute(own, wholes)
    back = [[made[slice(*ends[number])] for number, made in zip(own, results, strict=True)] for ends in rows]
    home = _swap(back, [[parts[number] for number in numbers] for numbers in owned], group)
    found = dict(zip(chain(*owned), home, strict=True))
    return [found[number] for number in range(len(parts))]


def _shared_out(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the indices of the matrices that each rank computes: the most costly is assigned first, each to the rank
    that has the least."""
    owned, work = [[] for _ in range(ranks)], [0] * ranks
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        least = work.index(min(work))
        owned[least].append(number)
        work[least] += costs[number]
    return owned


def _swap(
    sent: Sequence[Sequence[torch.Tensor]], like: Sequence[Sequence[torch.Tensor]], group: ProcessGroup
) -> list[torch.Tensor]:
    """Send matrices to each rank, and return the matrices that the ranks have sent, which are shaped `like` these."""
    to_ranks, from_ranks = ([sum(one.numel() for one in of_rank) for of_rank in side] for side in (sent, like))
    flat = torch.cat([one.reshape(-1) for one in chain(*sent)])
    received = flat.new_empty(sum(from_ranks))
    torch.distributed.all_to_all_single(received, flat, from_ranks, to_ranks, group=group)
    pieces = received.split([one.numel() for one in chain(*like)])
    return [piece.view_as(one) for piece, one in zip(pieces, chain(*like), strict=True)]
