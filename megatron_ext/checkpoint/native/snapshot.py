"""Copies into host memory what a save writes while the training goes on."""

from collections.abc import Callable, Hashable

import torch
from torch.distributed import ProcessGroup

from megatron_ext.device.protocol import Copies

Copy = Callable[[Hashable, torch.Tensor], torch.Tensor]
"""Makes what is saved of a tensor, from a name that it has in every save, and the tensor."""


def as_it_is(_name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, for a save that the training waits for."""
    return tensor


class HostMemory:
    """Copies of tensors, in memory that one save after the other uses: fresh memory takes several times as long as
    the copy. It stays as large as what this rank has taken, and is pinned where the tensors lie on a GPU."""

    def __init__(self) -> None:
        self._copies: dict[Hashable, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies.values())

    def copy(self, copies: Copies, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Return what is going to be a copy, which `copies` begins."""
        kept = self._copies.get(name)
        if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
            on_host = tensor.device.type == "cpu"
            kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=not on_host)
            self._copies[name] = kept
        copies.copy(kept, tensor)
        return kept


class HostGroups:
    """Makes groups that move host memory next to the training's own, whose collectives must not be disturbed."""

    def __init__(self) -> None:
        self._groups: dict[ProcessGroup, ProcessGroup] = {}

    def of(self, group: ProcessGroup) -> ProcessGroup:
        """Return a group of the same ranks, over gloo. Collective when it is asked for first."""
        if group not in self._groups:
            ranks = torch.distributed.get_process_group_ranks(group)
            self._groups[group] = torch.distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)  # pyright: ignore[reportArgumentType]
        return self._groups[group]
