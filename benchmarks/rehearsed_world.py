"""A world of any number of ranks in one process, which plays one of them at a time.

    with played(rank=0, world_size=1024) as zero:
        run = ...                                  # the program's own functions
    with played(rank=1, world_size=1024, heard=zero.told):
        ...

torch's fake process group makes groups, and lets collectives of tensors return at once. Objects it cannot invent:
rank 0 records what it tells all others, and who plays another rank afterwards hears that. What is gathered on rank 0 is
recorded by whoever sends it, and given to rank 0 when it is played last.
"""

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.parallel import groups
from megatron_ext.parallel.operations import WrappedMethods

RANKS_OF_A_NODE = 8


class Objects:
    """Stands for torch's collectives of objects, on one rank.

    Args:
        rank: this rank.
        heard: what rank 0 told all others, as it recorded it.
        gathered: for rank 0, what each of the other ranks sent, in the order of the ranks; without, its own is all that
            it gathers.
    """

    def __init__(self, rank: int, heard: Sequence[bytes] = (), gathered: Sequence[Sequence[bytes]] = ()):
        self._rank, self._gathered = rank, gathered
        self._heard = iter(heard)
        self.told: list[bytes] = []
        """What rank 0 told all others, in this order."""
        self.sent: list[bytes] = []
        """What this rank sent to rank 0, in this order."""

    def all_gather_object(self, everyones: list[Any], own: Any, group: Any = None) -> None:
        """Give all ranks what this one has."""
        everyones[:] = [own] * len(everyones)

    def broadcast_object_list(self, objects: list[Any], src: int = 0, group: Any = None) -> None:
        """Tell what rank 0 has, or hear it."""
        if self._rank == src:
            self.told.append(pickle.dumps(objects))
        else:
            objects[:] = pickle.loads(next(self._heard))

    def gather_object(self, obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0, **_: Any) -> None:
        """Send an object to rank 0, which unpickles those of all ranks."""
        self.sent.append(pickle.dumps(obj))
        if object_gather_list is not None:
            others = [sent[len(self.sent) - 1] for sent in self._gathered]
            object_gather_list[:] = [pickle.loads(pickled) for pickled in (self.sent[-1], *others)]


_REPLACED = ("all_gather_object", "broadcast_object_list", "gather_object")


@contextmanager
def played(
    rank: int, world_size: int, heard: Sequence[bytes] = (), gathered: Sequence[Sequence[bytes]] = ()
) -> Iterator[Objects]:
    """Return a context in which this process is a rank of a world in which eight ranks share a node.

    Args:
        heard: what rank 0 told the others (`told` of the one that played it).
        gathered: what each of the other ranks sent to rank 0 (`sent`), if this is rank 0 and somebody asks.
    """
    variables = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % RANKS_OF_A_NODE,
        "LOCAL_WORLD_SIZE": min(RANKS_OF_A_NODE, world_size),
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: str(value) for name, value in variables.items()})
    objects = Objects(rank, heard, gathered)
    replaced, module = WrappedMethods(), cast(Any, torch.distributed)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        for name in _REPLACED:
            replaced.wrap(module, name, lambda _original, name=name: getattr(objects, name))
        yield objects
    finally:
        replaced.put_back()
        groups.destroy()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
