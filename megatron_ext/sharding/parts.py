"""The optimizers of a run as the rest of the program sees them: the tensors that they update, who updates them, and the
state that this rank keeps, saves and reads."""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer, MegatronOptimizer
from torch.distributed import ProcessGroup

from megatron_ext.parallel.rows import RowShard, row_shard

MASTER = "param"
"""The state that a 16-bit weight's fp32 master copy is saved as, under megatron-core's name."""

State = Mapping[str, torch.Tensor]
"""The optimizer's tensors for one weight, by their name ("exp_avg")."""


@dataclass(frozen=True)
class Exchange:
    """Says how the shards of a distributed optimizer's state move between its ranks."""

    group_of: Callable[[ProcessGroup], ProcessGroup]
    """Maps the optimizer's group to the one of the same ranks that moves the shards."""
    device: torch.device | None
    """Device of the shards in transit; None: where the gradients are."""


IN_PLACE = Exchange(lambda group: group, None)
"""An exchange by the groups of the training, which must not use them meanwhile."""


class Updater(Protocol):
    """The torch optimizers that update the tensors of one of megatron-core's optimizers."""

    @property
    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """Torch optimizers that update, on the device or in host memory."""
        ...

    @property
    def host_optimizers(self) -> list[torch.optim.Optimizer]:
        """Torch optimizers that update in host memory, for weights on the device."""
        ...

    def updated_by(self, main: torch.Tensor) -> tuple[torch.optim.Optimizer, torch.Tensor]:
        """Return the torch optimizer that updates `main`, and the tensor that is the key of its state."""
        ...

    def master_of(self, main: torch.Tensor) -> torch.Tensor:
        """Return the tensor that holds the values of `main` between updates."""
        ...

    def refresh(self) -> None:
        """Take over the values of `main` tensors that others have changed. Call it after such a change."""
        ...


class OnDevice:
    """One of torch's optimizers, which updates tensors where they lie."""

    def __init__(self, torch_optimizer: torch.optim.Optimizer):
        self.torch_optimizers = [torch_optimizer]
        self.host_optimizers: list[torch.optim.Optimizer] = []

    def updated_by(self, main: torch.Tensor) -> tuple[torch.optim.Optimizer, torch.Tensor]:
        return self.torch_optimizers[0], main

    def master_of(self, main: torch.Tensor) -> torch.Tensor:
        return main

    def refresh(self) -> None:
        """There is no second copy."""


class OptimizerPart:
    """One of megatron-core's optimizers, of which a run has one or several, each for some of its weights.

    This class is for those whose whole state every data-parallel rank keeps; each way to divide it has a subclass.

    Args:
        core: megatron-core's optimizer.
    """

    divides_state = False
    """Whether data-parallel ranks divide the state among themselves."""

    def __init__(self, core: MegatronOptimizer):
        self.core: Any = core
        self.updater: Updater = OnDevice(self.core.optimizer)

    def main_parameters(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Yield every weight of the model with the tensor that is updated: itself, its fp32 copy, or a shard of
        either."""
        if isinstance(self.core, FP32Optimizer):
            for group in self.core.optimizer.param_groups:
                yield from zip(group["params"], group["params"], strict=True)
            return
        for weights, copies in zip(self.core.float16_groups, self.core.fp32_from_float16_groups, strict=True):
            yield from zip(weights, copies, strict=True)
        for weights in self.core.fp32_from_fp32_groups:
            yield from zip(weights, weights, strict=True)

    def saves_master(self, weight: torch.nn.Parameter) -> bool:
        """Return whether the state of `weight` includes an fp32 master, since the weight is saved in 16 bits."""
        return weight.dtype != torch.float32

    def own(self, weight: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        """Return the part of `values` that this rank updates; `values` has the shape of `weight` on this rank."""
        return values

    def rows_to_read(self, weight: torch.nn.Parameter) -> Sequence[RowShard] | None:
        """Return the rows of `weight`, in their order, whose state includes this rank's part of it; None for all."""
        shard = row_shard(weight)
        return None if shard is None else [shard]

    def to_read(self, weight: torch.nn.Parameter, state: State) -> State:
        """Return tensors into which the state of `weight` can be read from a checkpoint: for all its rows, or for
        `rows_to_read`.

        Args:
            state: optimizer state of `weight`, as this rank keeps it.
        """
        return state

    def own_of_rows(self, weight: torch.nn.Parameter, rows: torch.Tensor) -> torch.Tensor:
        """Return the state of `weight` that this rank keeps, cut out of the state of `rows_to_read`."""
        return rows

    def to_save(
        self, states: Mapping[int, State], moments: Sequence[str], exchange: Exchange
    ) -> tuple[Mapping[int, State], int | None]:
        """Return the state that this rank writes. Collective over data-parallel ranks that divide it in flat ranges.

        Args:
            states: state that this rank keeps (or a copy of it), by the weight's id().
            moments: names of the optimizer's tensors, masters aside.
            exchange: how shards move between ranks.
        Returns:
            The state by the weight's id(), and the data-parallel rank that writes it in place of the one that writes
            the weight; None where that is the same.
        """
        return states, None


class _LeftOut(NamedTuple):
    having: list[Any]
    """Weights that had a gradient when this was found out."""
    outside: list[Any]
    """Weights of these that the norm leaves out."""


_left_out: weakref.WeakKeyDictionary[Any, _LeftOut] = weakref.WeakKeyDictionary()


def outside_norm(optimizer: ChainedOptimizer) -> Iterator[torch.Tensor]:
    """Yield this rank's gradients that are not in the global norm.

    The norm leaves out gradients that it would count twice: all but the first tensor-parallel rank's gradient of a
    replicated parameter, and the last stage's of tied embeddings. They update copies of the weight all the same.
    """
    for part in optimizer.chained_optimizers:
        having = [main for main in part.get_parameters() if main.grad is not None]
        known = _left_out.get(part)
        # Which gradients are left out follows from marks of the weights, which the engine asks for one by one.
        if known is None or len(known.having) != len(having) or not all(map(operator.is_, known.having, having)):
            # Not by the part's own method, which may return the norm of what it stands for.
            counted = {id(gradient) for gradient in MegatronOptimizer.get_grads_for_grad_norm(part)}
            known = _LeftOut(having, [main for main in having if id(main.grad) not in counted])
            _left_out[part] = known
        yield from (main.grad for main in known.outside if main.grad is not None)


def gradients_of_update(parts: Iterable[OptimizerPart]) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Yield each parameter of the model that has a gradient, with this rank's part of it."""
    for part in parts:
        for parameter, main in part.main_parameters():
            if main.grad is not None:
                yield parameter, main.grad
