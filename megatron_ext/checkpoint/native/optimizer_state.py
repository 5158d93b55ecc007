"""The optimizer's state as tensors that are shaped and cut like the weights that they belong to.

Whichever of megatron-core's optimizers holds it (fp32, mixed precision, distributed), the state is saved under the
same keys: `optimizer.state.exp_avg.<key of the weight>` and so on, and `optimizer.state.param.<key>` for the fp32
master copy of a 16-bit weight. These are the keys of megatron-core's `fully_reshardable` format, so that any layout
can read what any other has written. megatron-core's own conversion is not used: with torch's optimizers it fails
before the first update, knows only Adam, and gives each class of optimizer keys of its own.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch.distributed import ProcessGroup

from megatron_ext.checkpoint.native.saved_rows import Pieces, joined, pieces
from megatron_ext.checkpoint.native.snapshot import Copy
from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.parallel.rows import row_shard
from megatron_ext.sharding.host_memory import updater
from megatron_ext.sharding.parts import is_flat, is_sharded, main_parameters, own_part

Contents = dict[str, dict[str, ShardedBase | Pieces]]
"""By state ("exp_avg"), then by this rank's name of the weight."""

_MASTER = "param"


@dataclass(frozen=True)
class Exchange:
    """How the shards of a distributed optimizer's state move between its ranks."""

    group_of: Callable[[ProcessGroup], ProcessGroup]
    """From the optimizer's group to the one of the same ranks that moves them."""
    device: torch.device | None
    """Where they lie; None: where the gradients do."""


IN_PLACE = Exchange(lambda group: group, None)
"""By the groups of the training, which must not use them meanwhile."""


@dataclass(frozen=True)
class Taken:
    """The state of an optimizer on this rank at one moment."""

    part: MegatronOptimizer
    moments: tuple[str, ...]
    own: Mapping[int, Mapping[str, torch.Tensor]]
    """By the id() of the weight."""


def take(optimizer: MegatronOptimizer, config: OptimizerConfig, copy: Copy, written: Collection[int]) -> list[Taken]:
    """The state of this rank, of the weights that it writes (by their id()); of a sharded optimizer, its shards."""
    taken = []
    for number, part in enumerate(parts(optimizer)):
        initialize_state(part, config)
        everything = is_sharded(part)
        own = {
            id(parameter): {
                name: copy(("optimizer", number, index, name), tensor.detach()) for name, tensor in tensors.items()
            }
            for index, (parameter, tensors) in enumerate(_own_state(part, config))
            if everything or id(parameter) in written
        }
        taken.append(Taken(part, _moments(config), own))
    return taken


def state_to_save(taken: Sequence[Taken], weights: Mapping[str, Any], exchange: Exchange) -> Contents:
    """The state that this rank writes, whole for each weight. Collective over the data-parallel ranks.

    Args:
        weights: this rank's weights as sharded tensors or factories, by name.
        exchange: how shards move between ranks.
    """
    values, writers = {}, {}
    for one in taken:
        if is_flat(one.part):
            gathered = {id(parameter): tensors for parameter, tensors in _gather(one.part, one, exchange)}
            writers |= dict.fromkeys(gathered, one.part.data_parallel_group.rank())
            values |= gathered
        else:
            values |= one.own
    contents = _like_weights(values, weights)
    for tensors in contents.values():
        for name, tensor in tensors.items():
            if id(weights[name].data) in writers:
                tensors[name] = _written_by(tensor, writers[id(weights[name].data)])
    return contents


def state_to_load(optimizer: MegatronOptimizer, config: OptimizerConfig, weights: Mapping[str, Any]) -> Contents:
    """Tensors to read the state into; then call `restore` with what was read."""
    values = {}
    for part in parts(optimizer):
        initialize_state(part, config)
        for parameter, tensors in _own_state(part, config):
            if is_flat(part):
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
                    shard = row_shard(parameter)
                    if shard is not None:
                        if tensor.numel():
                            tensor.copy_(joined(shard, loaded[state][names[id(parameter)]]))
                        continue
                    whole = loaded[state][names[id(parameter)]]
                    tensor.copy_(own_part(part, parameter, whole))
            updater(part).refresh()


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that hold parameters on this rank."""
    return [part for part in getattr(optimizer, "chained_optimizers", [optimizer]) if part.optimizer is not None]


def _rules(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """torch's optimizers in those of megatron-core."""
    return [rule for part in parts(optimizer) for rule in updater(part).rules]


def step_count(optimizer: MegatronOptimizer) -> int:
    """Updates that Adam has made (its bias correction depends on them); the same for all parameters."""
    counts = {0}
    for rule in _rules(optimizer):
        counts |= {int(state["step"]) for state in rule.state.values() if "step" in state}
        counts |= {int(group["step"]) for group in rule.param_groups if "step" in group}
    assert len(counts - {0}) <= 1, f"parameters differ in their number of updates: {counts}"
    return max(counts)


def set_step_count(optimizer: MegatronOptimizer, count: int) -> None:
    """Every parameter gets a tensor of its own: a shared one would be advanced once for each parameter."""
    for rule in _rules(optimizer):
        for group in rule.param_groups:
            if isinstance(rule, torch.optim.Adam):
                for main in group["params"]:
                    state = rule.state[main]
                    state["step"] = torch.full_like(state["step"], float(count))
            elif count:
                group["step"] = count  # apex's and Transformer Engine's Adam count per group; SGD does not count


def initialize_state(part: MegatronOptimizer, config: OptimizerConfig) -> None:
    """Give parameters that were never updated the state that the first update begins from: zeros."""
    for rule in updater(part).rules:
        for group in rule.param_groups:
            for main in group["params"]:
                _begin(rule.state[main], main, group, rule, config)


def _begin(
    state: dict[str, Any],
    main: torch.Tensor,
    group: dict[str, Any],
    rule: torch.optim.Optimizer,
    config: OptimizerConfig,
) -> None:
    for name in _moments(config):
        if state.get(name) is None:
            state[name] = torch.zeros_like(main, memory_format=torch.preserve_format)
    if isinstance(rule, torch.optim.Adam) and "step" not in state:
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
    updates = updater(part)
    for parameter, main in main_parameters(part):
        rule, updated = updates.updated_by(main)
        tensors = {name: rule.state[updated][name] for name in _moments(config)}
        if getattr(part, "compute_dtype", parameter.dtype) != torch.float32:
            tensors[_MASTER] = updates.master_of(main)
        yield parameter, tensors


def _gather(
    part: DistributedOptimizer, taken: Taken, exchange: Exchange
) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """Whole state of the weights that this rank writes, from the shards of all, bucket by bucket, in host memory.

    A weight is written by the rank whose shard holds its beginning, so that every rank writes about as much as its
    shard, and receives no more than what the last of its weights has on the ranks after it.
    """
    group = exchange.group_of(part.data_parallel_group)
    for buffer, ranges in zip(part.buffers, part.gbuf_ranges, strict=True):
        [bucket_ranges] = ranges.values()
        for bucket, bucket_range in zip(buffer.buckets, bucket_ranges, strict=True):
            places = [(*bucket.param_to_index[parameter], parameter) for parameter in bucket.params_list]
            places.sort(key=lambda place: place[0])
            size = bucket.grad_data.numel() // group.size()
            spans = _spans([(start, end) for start, end, _ in places], size, group.size())
            names = [*taken.moments, *([_MASTER] if buffer.param_dtype != torch.float32 else [])]
            whole = {}
            for name in names:
                shard = torch.zeros(size, dtype=torch.float32, device=exchange.device or bucket.grad_data.device)
                for parameter, parameter_range in bucket_range["param_map"].items():
                    place = parameter_range["gbuf_local"]
                    shard[place.start : place.end] = taken.own[id(parameter)][name]
                whole[name] = _exchange(shard, spans, group).cpu()
            first, last = spans[group.rank()]
            for start, end, parameter in places:
                if first <= start < last:
                    yield (
                        parameter,
                        {name: flat[start - first : end - first].view(parameter.shape) for name, flat in whole.items()},
                    )


def _spans(places: Sequence[tuple[int, int]], shard_size: int, ranks: int) -> list[tuple[int, int]]:
    """For every rank, where in the bucket the weights begin and end that it writes."""
    spans = []
    for rank in range(ranks):
        own = [(start, end) for start, end in places if start // shard_size == rank]
        spans.append((own[0][0], own[-1][1]) if own else (0, 0))
    return spans


def _exchange(shard: torch.Tensor, spans: Sequence[tuple[int, int]], group: ProcessGroup) -> torch.Tensor:
    """This rank's span of the bucket, of which every rank has a shard. Collective."""

    def overlap(owner: int, rank: int) -> tuple[int, int]:
        """Of the shard of `owner` with the span of `rank`, within the shard; the start is no more than the end."""
        begin, end = owner * shard.numel(), (owner + 1) * shard.numel()
        low, high = max(begin, spans[rank][0]), min(end, spans[rank][1])
        return (low - begin, high - begin) if low < high else (0, 0)

    rank, ranks = group.rank(), range(group.size())
    sent = [overlap(rank, other) for other in ranks]
    received = [high - low for low, high in (overlap(other, rank) for other in ranks)]
    span = shard.new_empty(sum(received))
    torch.distributed.all_to_all_single(
        span,
        torch.cat([shard[low:high] for low, high in sent]),
        received,
        [high - low for low, high in sent],
        group=group,
    )
    return span


def _written_by(tensor: Any, rank: int) -> Any:
    """The same tensor for the engine, which takes the replica of data-parallel rank 0 for the one to be written."""
    *others, replica = tensor.replica_id
    # With several instances of the optimizer, each has all of the state; it is written by the ranks of the first.
    return replace(tensor, replica_id=(*others, replica - rank))


def _like_weights(values: Mapping[int, Mapping[str, torch.Tensor]], weights: Mapping[str, Any]) -> Contents:
    """Cut every tensor as its weight is cut. Weights without values (another rank writes them) are left out."""
    contents: Contents = {}
    for name, weight in weights.items():
        for state, tensor in values.get(id(weight.data), {}).items():
            key = f"optimizer.state.{state}.{weight.key}"
            shard = row_shard(weight.data)
            if shard is not None:
                if not shard.local.numel():
                    continue
                contents.setdefault(state, {})[name] = pieces(weight, shard, tensor, key)
                continue
            changes: dict[str, Any] = {"key": key, "data": tensor}
            if not isinstance(weight, ShardedTensorFactory):
                changes["dtype"] = tensor.dtype
            contents.setdefault(state, {})[name] = replace(weight, **changes)
    return contents
