"""Row shards, for FSDP2 and Megatron-FSDP: every weight is divided by rows, and optimizers see this rank's rows as
plain tensors. torch's optimizers, norms and clipping then do not know of shards."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.torch_optimizer import is_torchs, over
from megatron_ext.parallel.rows import row_shard
from megatron_ext.sharding.engine import updating
from megatron_ext.sharding.parts import OptimizerPart
from megatron_ext.sharding.scheme import Reduced, Sharding


class RowSharding(Sharding):
    """A scheme whose weights are divided into rows."""

    def parts(self, optimizer: ChainedOptimizer) -> list[OptimizerPart]:
        return updating(optimizer, RowPart)

    def reduced_gradients(self, chunk: _BaseDataParallel) -> Reduced:
        for parameter in chunk.parameters():
            shard = row_shard(parameter)
            assert shard is not None
            yield parameter, shard.gather(local_gradient(parameter))

    def holders_of_one_copy(
        self, optimizer: ChainedOptimizer, groups: ProcessGroupCollection
    ) -> tuple[ProcessGroup, ProcessGroup]:
        holders = optimizer.chained_optimizers[0].get_grad_stats_parallel_group()
        return holders, holders


class RowShards:
    """Base of the optimizers over rows. Made from the optimizer that megatron-core builds over the weights, before its
    use."""

    optimizer: torch.optim.Optimizer
    weights: list[tuple[torch.nn.Parameter, torch.Tensor]]
    """Every weight, and the rows that are updated."""

    compute_dtype: torch.dtype
    """Dtype of the forward pass; the rows are fp32."""

    _sources: list[torch.nn.Parameter]

    def take_rows(self, compute_dtype: torch.dtype, weight_of: Callable[[Any], torch.nn.Parameter]) -> None:
        """Optimize rows in place of whole parameters.

        Args:
            weight_of: maps a parameter that the optimizer was built over, which gets the gradients, to the model's
                weight.
        """
        self.compute_dtype = compute_dtype
        self.weights, self._sources = [], []
        for group in self.optimizer.param_groups:
            sources = list(group["params"])
            group["params"] = [_optimized(source) for source in sources]
            self.weights += zip(map(weight_of, sources), group["params"], strict=True)
            self._sources += sources

    def attach_gradients(self) -> None:
        """Give every row the part of the reduced gradient that belongs to it."""
        for source, (_, rows) in zip(self._sources, self.weights, strict=True):
            rows.grad = local_gradient(source)


class RowPart(OptimizerPart):
    """An optimizer over rows. They are fp32, whatever the weights are computed with and saved in."""

    divides_state = True

    def main_parameters(self) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        yield from self.core.weights

    def saves_master(self, weight: torch.nn.Parameter) -> bool:
        return self.core.compute_dtype != torch.float32


class RowShardOptimizer(RowShards, FP32Optimizer):
    """megatron-core's fp32 optimizer over rows (FSDP2)."""

    def __init__(self, optimizer: FP32Optimizer, compute_dtype: torch.dtype, groups: ProcessGroupCollection):
        super().__init__(optimizer.optimizer, optimizer.config, optimizer.init_state_fn)
        # The norm is summed over those ranks that hold one copy of the model together.
        self.grad_stats_parallel_group = groups.intra_dist_opt
        self.tp_group = self.expert_tp_group = groups.tp
        self.take_rows(compute_dtype, lambda weight: weight)

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Give every row its gradient; return False, as no loss scale can overflow."""
        self.attach_gradients()
        return False


class HostRowOptimizer(RowShardOptimizer):
    """megatron-core's fp32 optimizer over rows in host memory, where torch updates them.

    Args:
        device: device of the forward and backward passes; norms are added up on it.
        config: chooses the torch optimizer.
    """

    def __init__(
        self,
        optimizer: FP32Optimizer,
        compute_dtype: torch.dtype,
        groups: ProcessGroupCollection,
        device: torch.device,
        config: OptimizerConfig,
    ):
        super().__init__(optimizer, compute_dtype, groups)
        self._device = device
        if not is_torchs(self.optimizer, config):  # apex's are for GPUs alone
            self.optimizer = over(self.optimizer.param_groups, config)

    def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
        """Return one element on the device, whose norm equals the norm of this rank's gradients."""
        norms = [torch.norm(gradient) for gradient in super().get_grads_for_grad_norm(grad_norm_group)]
        return [torch.norm(torch.stack(norms)).view(1).to(self._device)] if norms else []


def local_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return this rank's rows of the reduced gradient; an empty tensor where this rank has none."""
    shard = row_shard(parameter)
    assert shard is not None
    gradient: Any = parameter.grad
    return torch.zeros_like(shard.local) if gradient is None else gradient._local_tensor


def _optimized(weight: torch.nn.Parameter) -> torch.Tensor:
    """Return the rows of the weight, with the attributes by which megatron-core tells replicated weights from divided
    ones."""
    shard = row_shard(weight)
    assert shard is not None
    rows: Any = shard.local.detach()
    for name in ("tensor_model_parallel", "allreduce", "shared", "matrix"):
        if hasattr(weight, name):
            setattr(rows, name, getattr(weight, name))
    return rows
