"""megatron-core's optimizers, of which a chain has one or several: what they update, and which part of the state this
rank keeps."""

from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer

from megatron_ext.sharding.row_shards import RowShards


def main_parameters(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """(weight of the model, what the optimizer updates: itself, its fp32 copy, or a flat shard of either)."""
    if isinstance(part, RowShards):
        yield from part.weights
    elif isinstance(part, DistributedOptimizer):
        for parameter, (group, index) in part.model_param_group_index_map.items():
            yield parameter, part.optimizer.param_groups[group]["params"][index]
    elif isinstance(part, FP32Optimizer):
        for group in part.optimizer.param_groups:
            yield from zip(group["params"], group["params"], strict=True)
    else:
        for weights, copies in zip(part.float16_groups, part.fp32_from_float16_groups, strict=True):
            yield from zip(weights, copies, strict=True)
        for weights in part.fp32_from_fp32_groups:
            yield from zip(weights, weights, strict=True)


def is_sharded(part: MegatronOptimizer) -> bool:
    """Whether data-parallel ranks divide the state among themselves."""
    return isinstance(part, DistributedOptimizer | RowShards)


def is_flat(part: MegatronOptimizer) -> TypeGuard[DistributedOptimizer]:
    """Whether a rank's shard is a flat range of all weights one after another, rather than rows of each."""
    return isinstance(part, DistributedOptimizer) and not isinstance(part, RowShards)


def own_part(part: MegatronOptimizer, weight: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
    """Of `values`, which are shaped as `weight`, those that `part` updates on this rank."""
    if not is_flat(part):
        return values
    own = part._get_model_param_range_map(weight)["param"]
    return values.view(-1)[own.start : own.end]
