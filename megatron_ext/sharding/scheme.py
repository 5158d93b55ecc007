"""The interface of a sharding scheme: the rest of the program calls it and does not ask which scheme it is."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch.distributed import ProcessGroup

from megatron_ext.config.derived.optimizer_traits import AVERAGE
from megatron_ext.config.schema import Config
from megatron_ext.device.device_protocol import Device
from megatron_ext.sharding.parts import OptimizerPart

Reduced = Iterator[tuple[torch.nn.Parameter, torch.Tensor]]
"""Parameters of the model, each with its whole reduced gradient."""


class Watcher(Protocol):
    """An observer of this rank's own gradients before their reduction over ranks."""

    def register(self, chunk: _BaseDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
        """Learn the parameters of `chunk`, and return them with their global names. Call it once for each chunk."""
        ...

    def watch(self, name: str, weight: torch.Tensor) -> None:
        """Look at every gradient that autograd computes for `weight`, whose global name is `name`."""
        ...

    def before_reduction(self, parameters: Sequence[Any]) -> None:
        """Look at the `main_grad` of `parameters`, which are complete on this rank and about to be reduced."""
        ...


class Sharding(ABC):
    """One scheme, for one run. `choose.sharding_of` makes it; everyone else calls these methods.

    A chunk is one of a rank's model chunks (one per virtual pipeline stage), after `shard` a wrapped one.
    """

    builds_on_meta = False
    """Whether model chunks are built on the meta device, since no rank may hold all of their weights."""

    keeps_output_weight = True
    """Whether the output layer's weight stays where its forward pass has it, or is gathered again for the backward."""

    lives_on_host = False
    """Whether weights, gradients and optimizer state are kept in host memory and communicated from host memory."""

    def __init__(self, config: Config):
        self.config = config

    @property
    def host_memory_flags(self) -> tuple[str, ...]:
        """The flags that were given to keep something in host memory that would be on the device."""
        return ()

    @abstractmethod
    def shard(
        self,
        chunks: Sequence[torch.nn.Module],
        core: TransformerConfig,
        groups: ProcessGroupCollection,
        device: Device,
    ) -> Sequence[_BaseDataParallel]:
        """Wrap the chunks that `model.gpt.build_model` built, initialized, and wired into the pipeline schedule.

        Args:
            core: gets the hooks by which the schedule starts or skips reductions.
        """

    @abstractmethod
    def optimizer(
        self, chunks: Sequence[_BaseDataParallel], groups: ProcessGroupCollection, device: Device
    ) -> ChainedOptimizer:
        """Build the optimizer of wrapped chunks."""

    @abstractmethod
    def parts(self, optimizer: ChainedOptimizer) -> list[OptimizerPart]:
        """Return the parts of `optimizer` that update weights on this rank, always in the same order."""

    @abstractmethod
    def gathered(self, chunks: Sequence[_BaseDataParallel]) -> AbstractContextManager[None]:
        """Return a context in which all parameters of the chunks are up to date."""

    def gathered_before_update(self, chunks: Sequence[_BaseDataParallel]) -> AbstractContextManager[None]:
        """Return a context for another forward pass between the gradients of a step and its update: the weights are the
        ones that the passes before used, and the next step must still gather the updated ones."""
        return self.gathered(chunks)

    def averaged(
        self, optimizer: ChainedOptimizer, chunks: Sequence[_BaseDataParallel]
    ) -> AbstractContextManager[None]:
        """Return a context in which the weights are replaced by the averages that the optimizer of these chunks keeps.
        Collective."""
        return averaged(self.parts(optimizer))

    def weights_in_place(self, chunks: Sequence[_BaseDataParallel]) -> AbstractContextManager[None]:
        """Return a context in which the modules' parameters are its weights and no shards, whatever their values."""
        return nullcontext()

    @abstractmethod
    def reduced_gradients(self, chunk: _BaseDataParallel) -> Reduced:
        """Yield every parameter of the chunk with its reduced gradient, whole. Collective over data-parallel ranks."""

    @abstractmethod
    def watch(self, chunk: _BaseDataParallel, watcher: Watcher) -> None:
        """Let `watcher` see this rank's gradients of the chunk before their reduction."""

    @abstractmethod
    def holders_of_one_copy(
        self, optimizer: ChainedOptimizer, groups: ProcessGroupCollection
    ) -> tuple[ProcessGroup, ProcessGroup]:
        """Return the ranks that hold one copy of the model together.

        Returns:
            The group for all weights but the matrices of routed experts, and the group for these matrices.
        """

    @abstractmethod
    def held_weights(self, chunk: _BaseDataParallel) -> Iterator[torch.Tensor | None]:
        """Yield the tensors that hold the weights of the chunk between steps."""

    @abstractmethod
    def held_gradients(self, chunk: _BaseDataParallel) -> Iterator[torch.Tensor | None]:
        """Yield the tensors that hold its gradients, except the `grad` of tensors that the optimizer updates."""

    def finish_update(self, optimizer: ChainedOptimizer) -> None:  # noqa: B027 (most have nothing to free)
        """Free memory that only the update needed. Call it after every update."""

    def reload_masters(self, optimizer: ChainedOptimizer) -> None:
        """Make every fp32 master from the weights of the model; where rows are the masters, the weights from them."""
        for part in self.parts(optimizer):
            part.core.reload_model_params()


@contextmanager
def averaged(parts: Sequence[OptimizerPart]) -> Iterator[None]:
    """Exchange weights and averages inside the context, in any scheme; do nothing before the first update. Collective.

    Args:
        parts: parts of the run's optimizer, none in host memory.
    """
    _exchange(parts)
    try:
        yield
    finally:
        _exchange(parts)


@torch.no_grad()
def _exchange(parts: Sequence[OptimizerPart]) -> None:
    for part in parts:
        for _, main in part.main_parameters():
            optimizer, updated = part.updater.updated_by(main)
            average = optimizer.state[updated].get(AVERAGE)
            if average is not None:
                weight = main.clone()
                main.copy_(average)
                average.copy_(weight)
        # The engine makes weights of the masters, and gathers them, after an update: here of one that changes nothing.
        part.core.optimizer.step = lambda: None
        try:
            part.core.step_with_ready_grads()
        finally:
            del part.core.optimizer.step
