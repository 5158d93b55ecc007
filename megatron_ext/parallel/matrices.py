"""Whole matrices of what ranks divide: where a rank's part lies, and the exchange that has each matrix computed once."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch.distributed import ProcessGroup

from megatron_ext.parallel.rows import RowShard


@dataclass(frozen=True)
class Matrix:
    """Where in a matrix, or a stack of those of experts, that lies which a rank updates. An attribute of this name
    marks what is updated."""

    shape: tuple[int, ...]
    """Of a tensor-parallel rank's part: [rows, columns], or [experts, rows, columns]."""

    sections: tuple[int, ...] = ()
    """Rows of the matrices that lie one above another, again and again (`Parameter.sections`)."""

    divided: int | None = None
    """The dimension, -2 (rows) or -1 (columns), that the ranks of `group` divide; None: they have all of it."""

    group: ProcessGroup | None = None

    rows: RowShard | None = None
    """The rows that this data-parallel rank updates; None for all of them."""

    @property
    def is_cut(self) -> bool:
        """Whether data-parallel ranks have rows of one matrix. Of a stack they have whole ones."""
        return self.rows is not None and self.rows.group is not None and len(self.shape) == 2


def matrix_of(updated: torch.Tensor) -> Matrix:
    """Return the mark of what is updated; without one it is a whole matrix."""
    return getattr(updated, "matrix", None) or Matrix(tuple(updated.shape))


def rows_of_ranks(shards: Sequence[RowShard]) -> list[list[int]]:
    """Return for each rank of the shards' group how many rows it has of each. Collective."""
    group, own = shards[0].group, torch.tensor([len(shard.local) for shard in shards], device=shards[0].local.device)
    assert group is not None
    gathered = own.new_empty(group.size() * len(own))
    torch.distributed.all_gather_into_tensor(gathered, own, group=group)
    return gathered.view(group.size(), -1).tolist()


def on_owners(
    parts: Sequence[torch.Tensor],
    counts: Sequence[Sequence[int]],
    group: ProcessGroup,
    compute: Callable[[list[int], list[torch.Tensor]], list[torch.Tensor]],
) -> list[torch.Tensor]:
    """Return this rank's rows of what `compute` makes of whole matrices, each of which one rank puts together and
    computes. Collective.

    Args:
        parts: this rank's rows of each matrix.
        counts: of each rank, the rows of each matrix (`rows_of_ranks`).
        compute: from the numbers of this rank's matrices, and these, as many results of their shapes.
    """
    shapes = [(sum(rows), part.size(1)) for rows, part in zip(zip(*counts, strict=True), parts, strict=True)]
    owned = _shared_out([rows * columns * min(rows, columns) for rows, columns in shapes], group.size())
    own = owned[group.rank()]
    of_ranks = [[(rows[number], shapes[number][1]) for number in own] for rows in counts]
    pieces = _swap([[parts[number] for number in numbers] for numbers in owned], of_ranks, group)
    results = compute(own, [torch.cat(rows) for rows in zip(*pieces, strict=True)])
    split = [result.split([rows[number] for rows in counts]) for number, result in zip(own, results, strict=True)]
    back = [[one[rank] for one in split] for rank in range(group.size())]
    home = _swap(back, [[tuple(parts[number].shape) for number in numbers] for numbers in owned], group)
    found = dict(zip(chain(*owned), chain(*home), strict=True))
    return [found[number] for number in range(len(parts))]


def _shared_out(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Return for each rank the numbers of what it computes: the most costly first, each to who has the least."""
    owned, work = [[] for _ in range(ranks)], [0] * ranks
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        least = work.index(min(work))
        owned[least].append(number)
        work[least] += costs[number]
    return owned


def _swap(
    sent: Sequence[Sequence[torch.Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]], group: ProcessGroup
) -> list[list[torch.Tensor]]:
    """Return the matrices, of these shapes, that each rank has sent; `sent` are those for each."""
    flat = torch.cat([matrix.reshape(-1) for matrices in sent for matrix in matrices])
    sizes = [[math.prod(shape) for shape in of_rank] for of_rank in shapes]
    received = flat.new_empty(sum(map(sum, sizes)))
    numbers = [sum(matrix.numel() for matrix in matrices) for matrices in sent]
    torch.distributed.all_to_all_single(received, flat, [sum(size) for size in sizes], numbers, group=group)
    ranks = zip(received.split([sum(size) for size in sizes]), sizes, shapes, strict=True)
    return [
        [piece.view(shape) for piece, shape in zip(one.split(size), of_rank, strict=True)]
        for one, size, of_rank in ranks
    ]
