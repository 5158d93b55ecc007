"""The optimizer's state as tensors that are shaped and cut like the weights that they belong to.

Whichever of megatron-core's optimizers holds it (fp32, mixed precision, distributed), the state is saved under the
same keys: `optimizer.state.exp_avg.<key of the weight>` and so on, and `optimizer.state.param.<key>` for the fp32
master copy of a 16-bit weight. These are the keys of megatron-core's `fully_reshardable` format, so that any layout
can read what any other has written. megatron-core's own conversion is not used: with torch's optimizers it fails
before the first update, knows only Adam, and gives each class of optimizer keys of its own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import FP32Optimizer, MegatronOptimizer

from megatron_ext.config.schema import OptimizerConfig

Contents = dict[str, dict[str, ShardedBase]]
"""By state ("exp_avg"), then by this rank's name of the weight."""

_MASTER = "param"


def state_to_save(optimizer: MegatronOptimizer, config: OptimizerConfig, weights: Mapping[str, Any]) -> Contents:
    """The state, whole for each weight of this rank. Collective over the data-parallel ranks.

    Args:
        weights: this rank's weights as sharded tensors or factories, by name.
    """
    values = {}
    for part in parts(optimizer):
        initialize_state(part, config)
        gathered = _gather(part, config) if isinstance(part, DistributedOptimizer) else _own_state(part, config)
        values.update({id(parameter): tensors for parameter, tensors in gathered})
    return _like_weights(values, weights)


def state_to_load(optimizer: MegatronOptimizer, config: OptimizerConfig, weights: Mapping[str, Any]) -> Contents:
    """Tensors to read the state into; then call `restore` with what was read."""
    values = {}
    for part in parts(optimizer):
        initialize_state(part, config)
        for parameter, tensors in _own_state(part, config):
            if isinstance(part, DistributedOptimizer):
                # A shard is a flat range of the weight, which no rectangular cut of the saved tensor gives.
                tensors = {name: torch.empty(parameter.shape, dtype=torch.float32) for name in tensors}
            values[id(parameter)] = tensors
    return _like_weights(values, weights)


def restore(
    optimizer: MegatronOptimizer, config: OptimizerConfig, names: Mapping[int, str], loaded: Mapping[str, Any]
) -> None:
    """Put the state that was read (tensors by state, then by weight) into the optimizer.

    Args:
        names: this rank's name of each weight, by the parameter's id().
    """
    with torch.no_grad():
        for part in parts(optimizer):
            for parameter, tensors in _own_state(part, config):
                for state, tensor in tensors.items():
                    whole = loaded[state][names[id(parameter)]]
                    if isinstance(part, DistributedOptimizer):
                        own = part._get_model_param_range_map(parameter)["param"]
                        whole = whole.view(-1)[own.start : own.end]
                    tensor.copy_(whole)


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that hold parameters on this rank."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]


def step_count(optimizer: MegatronOptimizer) -> int:
    """Updates that Adam has made (its bias correction depends on them); the same for all parameters."""
    counts = {0}
    for part in parts(optimizer):
        counts |= {int(state["step"]) for state in part.optimizer.state.values() if "step" in state}
        counts |= {int(group["step"]) for group in part.optimizer.param_groups if "step" in group}
    assert len(counts - {0}) <= 1, f"parameters differ in their number of updates: {counts}"
    return max(counts)


def set_step_count(optimizer: MegatronOptimizer, count: int) -> None:
    """Every parameter gets a tensor of its own: a shared one would be advanced once for each parameter."""
    for part in parts(optimizer):
        for group in part.optimizer.param_groups:
            if isinstance(part.optimizer, torch.optim.Adam):
                for main in group["params"]:
                    state = part.optimizer.state[main]
                    state["step"] = torch.full_like(state["step"], float(count))
            elif count:
                group["step"] = count  # apex's and Transformer Engine's Adam count per group; SGD does not count


def initialize_state(part: MegatronOptimizer, config: OptimizerConfig) -> None:
    """Give parameters that were never updated the state that the first update begins from: zeros."""
    for group in part.optimizer.param_groups:
        for main in group["params"]:
            state = part.optimizer.state[main]
            for name in _moments(config):
                if state.get(name) is None:
                    state[name] = torch.zeros_like(main, memory_format=torch.preserve_format)
            if isinstance(part.optimizer, torch.optim.Adam) and "step" not in state:
                # Where torch itself puts it (_init_group of torch/optim/adam.py).
                on_device = group["fused"] or group["capturable"]
                state["step"] = torch.zeros((), dtype=torch.float32, device=main.device if on_device else None)


def _moments(config: OptimizerConfig) -> tuple[str, ...]:
    if config.optimizer == "adam":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.sgd_momentum else ()


def _own_state(
    part: MegatronOptimizer, config: OptimizerConfig
) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """For every weight of this rank, the tensors of its state; with the distributed optimizer, this rank's shards."""
    for parameter, main in _main_parameters(part):
        tensors = {name: part.optimizer.state[main][name] for name in _moments(config)}
        if parameter.dtype != torch.float32:
            tensors[_MASTER] = main
        yield parameter, tensors


def _main_parameters(part: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """(weight of the model, what the optimizer updates: itself, its fp32 copy, or a flat shard of either)."""
    if isinstance(part, DistributedOptimizer):
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


def _gather(
    part: DistributedOptimizer, config: OptimizerConfig
) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """Whole state from the shards, bucket by bucket, in host memory of the first data-parallel rank; it writes."""
    own = {id(parameter): tensors for parameter, tensors in _own_state(part, config)}
    group = part.data_parallel_group
    for buffer, ranges in zip(part.buffers, part.gbuf_ranges, strict=True):
        [bucket_ranges] = ranges.values()
        for bucket, bucket_range in zip(buffer.buckets, bucket_ranges, strict=True):
            names = [*_moments(config), *([_MASTER] if buffer.param_dtype != torch.float32 else [])]
            whole = {}
            for name in names:
                shard = torch.zeros(
                    bucket.grad_data.numel() // group.size(), dtype=torch.float32, device=bucket.grad_data.device
                )
                for parameter, parameter_range in bucket_range["param_map"].items():
                    place = parameter_range["gbuf_local"]
                    shard[place.start : place.end] = own[id(parameter)][name].detach()
                shards = [torch.empty_like(shard) for _ in range(group.size())] if group.rank() == 0 else None
                torch.distributed.gather(shard, shards, group=group, group_dst=0)
                if shards is not None:
                    whole[name] = torch.cat([shard.cpu() for shard in shards])
            for parameter in bucket.params_list if whole else ():
                start, end = bucket.param_to_index[parameter]
                yield parameter, {name: flat[start:end].view(parameter.shape) for name, flat in whole.items()}


def _like_weights(values: Mapping[int, Mapping[str, torch.Tensor]], weights: Mapping[str, Any]) -> Contents:
    """Cut every tensor as its weight is cut. Weights without values (another rank writes them) are left out."""
    contents: Contents = {}
    for name, weight in weights.items():
        for state, tensor in values.get(id(weight.data), {}).items():
            changes: dict[str, Any] = {"key": f"optimizer.state.{state}.{weight.key}", "data": tensor}
            if not isinstance(weight, ShardedTensorFactory):
                changes["dtype"] = tensor.dtype
            contents.setdefault(state, {})[name] = replace(weight, **changes)
    return contents
