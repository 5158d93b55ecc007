"""A row shard is a rank's part of a weight that data-parallel ranks divide among themselves (ZeRO-3, FSDP).

Both of them cut along the first dimension, into whole rows, unevenly where the ranks do not divide the rows. A
wrapper that shards weights puts a `RowShard` on each (`mark`); everyone else asks `row_shard(weight)`.
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RowShard:
    """This rank's rows of a weight."""

    local: torch.Tensor
    """Values of the rows, [rows, ...], in use by the model: the next forward pass computes with the values that are
    written into it."""

    first: int
    """Index of the first row."""

    shape: tuple[int, ...]
    """Shape of the weight that the ranks hold together: one tensor-parallel rank's shard, as without FSDP."""

    group: torch.distributed.ProcessGroup | None
    """The ranks that hold the weight together; None where this rank holds all rows."""

    replica: int = 0
    """Index of this shard among equal ones, where groups of ranks hold copies of the weight (HSDP)."""

    @property
    def stop(self) -> int:
        """Index after the last row."""
        return self.first + self.local.size(0)

    def gather(self, local: torch.Tensor | None = None) -> torch.Tensor:
        """Return the whole of the weight, or of another tensor that is cut as it is. Collective over the group.

        It is a sum with zeros, which is exact, and as good for uneven shards as for even ones. (-0 becomes 0.)
        """
        local = self.local if local is None else local
        if self.group is None:
            return local.detach().clone()
        whole = torch.zeros(self.shape, dtype=local.dtype, device=local.device)
        whole[self.first : self.stop] = local.detach()
        torch.distributed.all_reduce(whole, group=self.group)
        return whole


def mark(weight: torch.Tensor, shard: RowShard) -> None:
    """Say that this rank holds only `shard` of `weight`."""
    holder: Any = weight
    holder.row_shard = shard


def row_shard(weight: torch.Tensor) -> RowShard | None:
    """Return this rank's rows; None for a weight that it holds whole."""
    return getattr(weight, "row_shard", None)


def local_part(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the weight: its rows, or all of it."""
    shard = row_shard(weight)
    return weight.detach() if shard is None else shard.local
