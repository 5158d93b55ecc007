"""Gathers weights in fewer bits than they have: what a layer multiplies by is rounded where its shard lies, and sent.

Whoever has a layer multiply by rounded weights gives the weight a `Narrow` in its attribute `narrow`. Its scales follow
from the largest values of blocks of the whole weight, on which the ranks agree by one all-reduce of maxima. Every rank
then rounds the elements of its shard, wherever the shard begins and ends, so that the bytes are those of rounding the
gathered weight. The layer computes with these bytes (`Narrow.values`) while there are some. All others (evaluation,
checkpoints, exports) read weights that are gathered as they are.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup, ReduceOp


class Narrow(ABC):
    """One weight in eight bits, of which this rank has a range of elements in the order of memory."""

    over: Sequence[ProcessGroup] = ()
    """The ranks that hold other parts of what has one scale, next to the ranks that hold the other shards."""

    largest: torch.Tensor | None = None
    """Largest absolute value of every block of the whole weight, in fp32; None until ranks have agreed."""

    values: torch.Tensor | None = None
    """Bytes of the whole weight, without dimensions to tell; None while the weight itself is gathered."""

    @abstractmethod
    def largest_of(self, own: torch.Tensor, start: int) -> torch.Tensor:
        """Return the largest absolute value of every block among the elements `own`, the first of which has the index
        `start` in the weight: one dimension, in fp32; 0 for blocks without such an element."""

    @abstractmethod
    def narrowed(self, own: torch.Tensor, start: int) -> torch.Tensor:
        """Return the bytes of these elements, in uint8, by the scales of `largest`."""


class Held(NamedTuple):
    """The elements of a weight that this rank holds."""

    narrow: Narrow
    own: torch.Tensor
    start: int


@torch.no_grad()
def agree(held: Sequence[Held], group: ProcessGroup) -> None:
    """Find the largest values of the blocks of weights together with the ranks that hold the rest. Collective.

    Args:
        held: the weights, in the same order on all ranks; a rank may hold no element of some.
        group: the ranks that hold the other shards.
    """
    found = [each.narrow.largest_of(each.own, each.start) for each in held]
    _maxima_of_all(found, group)
    for other in {id(one): one for each in held for one in each.narrow.over}.values():
        _maxima_of_all([maxima for each, maxima in zip(held, found, strict=True) if other in each.narrow.over], other)
    for each, maxima in zip(held, found, strict=True):
        each.narrow.largest = maxima


def _maxima_of_all(found: Sequence[torch.Tensor], group: ProcessGroup) -> None:
    joined = torch.cat([*found])
    torch.distributed.all_reduce(joined, ReduceOp.MAX, group=group)
    for own, maxima in zip(found, joined.split([len(one) for one in found]), strict=True):
        own.copy_(maxima)


def narrow_of(weight: Any) -> Narrow | None:
    """Return how a weight is sent in eight bits; None where it is sent as it is."""
    return vars(weight).get("narrow")
