"""Defines what a run must offer to be saved and restored. `train.run.Run` offers it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.config.schema import Config
from megatron_ext.device.protocol import Device
from megatron_ext.sharding.protocol import Sharding


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
