"""Holds the parts of one run, wired once by `build` and handed to whoever needs them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig

from megatron_ext.config.derived.pipeline_split import last_stage
from megatron_ext.config.schema import Config
from megatron_ext.data.loader import BatchLoader
from megatron_ext.data.samples import Samples
from megatron_ext.data.skipped import SkippedSamples
from megatron_ext.device.device_protocol import Device
from megatron_ext.optim.qk_clip import QKClip
from megatron_ext.parts.numbers import RecordedNumbers
from megatron_ext.resilience.progress import Progress
from megatron_ext.sharding.scheme import Sharding
from megatron_ext.telemetry.timers import Timers
from megatron_ext.train.captured_passes import CapturedPasses
from megatron_ext.train.gradient_watch import GradientWatch
from megatron_ext.train.state import TrainState


@dataclass(frozen=True)
class HeldOut:
    """The data to evaluate on, the same at every evaluation."""

    loader: BatchLoader
    parts: tuple["HeldOutPart", ...]


@dataclass(frozen=True)
class HeldOutPart:
    """The samples of one source, by their positions in the data."""

    name: str
    suffix: str
    """Name in its log line and its tags."""
    positions: range


@dataclass(frozen=True)
class Loaders:
    """Holds where batches come from."""

    train: BatchLoader
    samples: Samples
    """The training data."""
    valid: HeldOut | None
    test: HeldOut | None
    skipped: SkippedSamples
    """Samples of the training data that are left out."""

    def close(self) -> None:
        """End the background threads."""
        self.train.close()
        for held_out in (self.valid, self.test):
            if held_out is not None:
                held_out.loader.close()


@dataclass
class Run:
    """Holds the parts of a training run on this rank."""

    config: Config
    device: Device
    groups: ProcessGroupCollection
    p2p: P2PCommunicator
    schedule: Callable[..., Any]
    """The engine's function of a step's forward and backward passes, which it runs in the order of `plan.schedule`."""
    transformer_config: TransformerConfig
    sharding: Sharding
    """Sharding scheme: how data-parallel ranks divide the model among themselves."""
    chunks: Sequence[_BaseDataParallel]
    """The model chunks of this rank, one per virtual stage."""
    optimizer: ChainedOptimizer
    gradient_watch: GradientWatch
    timers: Timers
    """Timers of the parts of a step; those above --timing-log-level do nothing."""
    loaders: Loaders
    numbers: RecordedNumbers
    """Numbers that the parts of the model record in a step."""
    state: TrainState
    data_record: Mapping[str, Any] | None = None
    """Data record, from which the samples follow, for the checkpoint; None with synthetic data, and on all but one rank
    of a node."""
    progress: Progress = field(default_factory=Progress)
    """Activity of this rank; the watchdog reads it."""
    qk_clip: QKClip | None = None
    """QK-clip, which bounds the products of queries and keys; None without --qk-clip."""
    captured_passes: CapturedPasses | None = None
    """CUDA graphs that replay the passes of a step; None where the passes run without graphs."""

    @property
    def rank(self) -> int:
        """This rank's number."""
        return torch.distributed.get_rank()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return torch.distributed.get_world_size()

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is on the first pipeline stage."""
        return self.groups.pp.rank() == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is on the last pipeline stage."""
        return self.groups.pp.rank() == last_stage(self.config.layout)

    @property
    def is_last_rank(self) -> bool:
        """Whether this is the rank that logs: it is on the last stage, as in Megatron-LM."""
        return self.rank == self.world_size - 1

    def release_graph(self) -> None:
        """Free the CUDA graphs, before the process groups end; training could begin anew."""
        if self.captured_passes is not None:
            self.captured_passes.release()

    def gathered_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which all parameters are up to date."""
        return self.sharding.gathered(self.chunks)
