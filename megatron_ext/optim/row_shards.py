"""Optimizers over the rows of this rank as plain tensors: torch's update rules, norms and clipping then do not know
of shards."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.parallel.rows import row_shard


class RowShards:
    """What such optimizers have in common. Made from what megatron-core builds over the weights, before its use."""

    optimizer: torch.optim.Optimizer
    weights: list[tuple[torch.nn.Parameter, torch.Tensor]]
    """Every weight, and the rows that are updated."""

    compute_dtype: torch.dtype
    """In which the forward pass computes; the rows are fp32."""

    _sources: list[torch.nn.Parameter]

    def take_rows(self, compute_dtype: torch.dtype, weight_of: Callable[[Any], torch.nn.Parameter]) -> None:
        """Optimize rows in place of whole parameters.

        Args:
            weight_of: from what the optimizer was built over, which gets the gradients, to the model's weight.
        """
        self.compute_dtype = compute_dtype
        self.weights, self._sources = [], []
        for group in self.optimizer.param_groups:
            sources = list(group["params"])
            group["params"] = [_optimized(source) for source in sources]
            self.weights += zip(map(weight_of, sources), group["params"], strict=True)
            self._sources += sources

    def attach_gradients(self) -> None:
        for source, (_, rows) in zip(self._sources, self.weights, strict=True):
            rows.grad = local_gradient(source)


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
        self.attach_gradients()
        return False


def local_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's rows of the reduced gradient; without rows an empty tensor."""
    shard = row_shard(parameter)
    assert shard is not None
    gradient: Any = parameter.grad
    return torch.zeros_like(shard.local) if gradient is None else gradient._local_tensor


def _optimized(weight: torch.nn.Parameter) -> torch.Tensor:
    """The rows of the weight, with the marks by which megatron-core tells copies from parts."""
    shard = row_shard(weight)
    assert shard is not None
    rows: Any = shard.local.detach()
    for name in ("tensor_model_parallel", "allreduce", "shared"):
        if hasattr(weight, name):
            setattr(rows, name, getattr(weight, name))
    return rows
