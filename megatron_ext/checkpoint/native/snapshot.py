"""Copies the state into host memory that a save writes while the training goes on.

Defines the attributes that a run must have to be saved and restored. `train.run.Run` has them.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import Config
from megatron_ext.device.device_protocol import Copies, Device
from megatron_ext.sharding.scheme import Sharding

Copy = Callable[[Hashable, torch.Tensor], torch.Tensor]
"""Returns the tensor to save, from the tensor and a name that it has in every save."""


def as_it_is(_name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, for a save that the training waits for."""
    return tensor


class HostMemory:
    """Copies of tensors, in memory that one save after the other uses: fresh memory takes several times as long as the
    copy. It stays as large as the copies that this rank has made, and is pinned where the tensors lie on a GPU."""

    def __init__(self) -> None:
        self._copies: dict[Hashable, torch.Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.numel() * copy.element_size() for copy in self._copies.values())

    def copy(self, copies: Copies, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Return the host tensor that receives the copy, which `copies` begins."""
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
        """Return a group of the same ranks, over gloo. The first call for a group is collective."""
        if group not in self._groups:
            ranks = torch.distributed.get_process_group_ranks(group)
            self._groups[group] = torch.distributed.new_group(ranks, backend="gloo", use_local_synchronization=True)  # pyright: ignore[reportArgumentType]
        return self._groups[group]


class Saveable(Protocol):
    """A run as saving and loading see it."""

    config: Config
    device: Device
    groups: ProcessGroupCollection
    chunks: Sequence[_BaseDataParallel]
    optimizer: ChainedOptimizer
    sharding: Sharding
    state: Any
    """A dataclass of plain numbers, `iteration` among them."""
    data_record: Mapping[str, Any] | None
    """Record of the data, saved next to the tensors, to be compared with the data of the run that goes on; None for
    synthetic data."""

    @property
    def rank(self) -> int:
        """This rank's number."""
        ...

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which all parameters are up to date."""
        ...
