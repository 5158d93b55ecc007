"""Holds the optimizer's state as tensors that are shaped and cut like the weights that they belong to.

Whichever of megatron-core's optimizers holds it (fp32, mixed precision, distributed), the state is saved under the
same keys: `optimizer.state.exp_avg.<key of the weight>` and so on, and `optimizer.state.param.<key>` for the fp32
master copy of a 16-bit weight. These are the keys of megatron-core's `fully_reshardable` format, so that any layout
can read what any other has written. megatron-core's own conversion is not used: with torch's optimizers it fails
before the first update, knows only Adam, and gives each class of optimizer keys of its own.

Row shards (FSDP) in a checkpoint: every rank writes and reads its own rows of the same global tensors that all other
layouts write, so that any layout can load what any other has saved.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory

from megatron_ext.checkpoint.native.snapshot import Copy
from megatron_ext.config.derived.optimizer_traits import AVERAGE
from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.torch_optimizer import begin_state, in_shape, is_torchs, scalar
from megatron_ext.parallel.rows import RowShard, row_shard
from megatron_ext.sharding.parts import MASTER, Exchange, OptimizerPart, State

Pieces = dict[str, ShardedTensor]
"""This rank's rows as sharded tensors, in order; two or more where a weight is saved in parts (SwiGLU's gate and up,
experts)."""


def pieces(weight: ShardedTensor | ShardedTensorFactory, shard: RowShard, rows: torch.Tensor, key: str) -> Pieces:
    """Return the sharded tensors that save `rows`, or into which to load them.

    Args:
        weight: how the weight would be saved if this rank held all of it.
        shard: the place of the rows in it.
        rows: rows of the weight or of optimizer state that is cut as it is.
        key: global name in the checkpoint.
    """
    of_rows: Pieces = {}
    start = 0
    for part in saved_parts(weight):
        stop = start + part.local_shape[0]
        # A row of stacked experts is one expert, a matrix of many rows, and saved by itself.
        each = math.prod(shard.shape[1:]) // math.prod(part.local_shape[1:])
        first = shard.first * each
        low, high = max(start, first), min(stop, shard.stop * each)
        if low < high:
            # Layers are one tensor in the checkpoint, stacked along axes before the weight's own.
            axis = part.prepend_axis_num
            # A copy where one of its dimensions is kept once and repeated (`State.along`).
            data = rows.reshape(-1, *part.local_shape[1:])[low - first : high - first]
            data = data.view((1,) * axis + tuple(data.shape))
            offset = list(part.global_offset)
            offset[axis] += low - start
            of_rows[str(len(of_rows))] = replace(
                part,
                key=key,
                data=data,
                dtype=data.dtype,
                local_shape=tuple(data.shape),
                global_offset=tuple(offset),
                axis_fragmentations=None,
                prepend_axis_num=0,
                replica_id=(*part.replica_id[:-1], shard.replica),  # pyright: ignore[reportIndexIssue]
            )
        start = stop
    return of_rows


def joined(shard: RowShard, loaded: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return this rank's rows, joined from the pieces that were read."""
    whole = torch.cat([loaded[index].reshape(-1) for index in sorted(loaded, key=int)])
    return whole.view(-1, *shard.shape[1:])


def saved_parts(weight: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    """Return the tensors of the checkpoint that make up a weight, one after another along its rows."""
    if isinstance(weight, ShardedTensor):
        return [weight]
    whole = torch.empty(weight.data.shape, dtype=weight.data.dtype, device="meta")
    return cast(list[ShardedTensor], weight.build_fn(weight.key, whole, weight.replica_id, None))


Contents = dict[str, dict[str, ShardedBase | Pieces]]
"""State by its name ("exp_avg"), then by this rank's name of the weight."""


@dataclass(frozen=True)
class OptimizerSnapshot:
    """The state of an optimizer on this rank at one moment."""

    part: OptimizerPart
    moments: tuple[str, ...]
    own: Mapping[int, State]
    """Tensors of the state by the id() of the weight."""


def take(
    parts: Sequence[OptimizerPart], config: OptimizerConfig, copy: Copy, written: Collection[int]
) -> list[OptimizerSnapshot]:
    """Copy the state of this rank, of the weights that it writes (by their id()); of a sharded optimizer, its
    shards."""
    snapshots = []
    for number, part in enumerate(parts):
        initialize_state(part, config)
        own = {
            id(parameter): {
                name: copy(("optimizer", number, index, name), tensor.detach()) for name, tensor in tensors.items()
            }
            for index, (parameter, tensors) in enumerate(own_state(part, config))
            if part.divides_state or id(parameter) in written
        }
        snapshots.append(OptimizerSnapshot(part, traits_of(config).state_names(config), own))
    return snapshots


def state_to_save(
    snapshots: Sequence[OptimizerSnapshot], weights: Mapping[str, Any], replicas: Mapping[str, int], exchange: Exchange
) -> Contents:
    """Return the state that this rank writes, whole for each weight. Collective over the data-parallel ranks.

    Args:
        weights: this rank's weights as sharded tensors or factories, by name.
        replicas: data-parallel rank of this replica of a weight, where its `replica_id` does not end with it.
        exchange: how shards move between ranks.
    """
    values, writers = {}, {}
    for one in snapshots:
        states, writer = one.part.to_save(one.own, one.moments, exchange)
        values |= states
        if writer is not None:
            writers |= dict.fromkeys(states, writer)
    rows = {id(weight.data): row_shard(weight.data) for weight in weights.values()}
    contents = _like_weights(values, weights, {key: shard and [shard] for key, shard in rows.items()})
    for tensors in contents.values():
        for name, tensor in tensors.items():
            if id(weights[name].data) in writers:
                replica = replicas.get(name, weights[name].replica_id[-1])
                tensors[name] = _written_by(tensor, replica, writers[id(weights[name].data)])
    return contents


def state_to_load(
    parts: Sequence[OptimizerPart], config: OptimizerConfig, weights: Mapping[str, Any], *, masters_alone: bool = False
) -> Contents:
    """Return tensors to read the state into; then call `restore` with the tensors that were read.

    Args:
        masters_alone: whether the fp32 masters are read, and nothing else of the state, which must not have begun.
    """
    values, rows = {}, {}
    for part in parts:
        if not masters_alone:
            initialize_state(part, config)
        for parameter, tensors in own_state(part, config):
            read = {name: one if once(one) is one else torch.empty_like(one) for name, one in tensors.items()}
            values[id(parameter)] = part.to_read(parameter, read)
            rows[id(parameter)] = part.rows_to_read(parameter)
    return _like_weights(values, weights, rows)


def restore(
    parts: Sequence[OptimizerPart], config: OptimizerConfig, names: Mapping[int, str], loaded: Mapping[str, Any]
) -> None:
    """Put the state that was read (tensors by state, then by weight) into the optimizer. Averages that were not read
    begin as the weights.

    Args:
        names: this rank's name of each weight, by the parameter's id().
    """
    with torch.no_grad():
        for part in parts:
            for parameter, tensors in own_state(part, config):
                rows = part.rows_to_read(parameter)
                for state, tensor in tensors.items():
                    if not tensor.numel() or (state == AVERAGE and AVERAGE not in loaded):
                        continue
                    read = loaded[state][names[id(parameter)]]
                    own = read if rows is None else part.own_of_rows(parameter, joined(rows[0], read))
                    kept = once(tensor)
                    kept.copy_(once(own.reshape(tensor.shape), tensor))
            part.updater.refresh()
    for torch_optimizer in _torch_optimizers(parts) if AVERAGE not in loaded else ():
        for state in torch_optimizer.state.values():
            state.pop(AVERAGE, None)


def _torch_optimizers(parts: Sequence[OptimizerPart]) -> list[torch.optim.Optimizer]:
    """Return torch's optimizers inside megatron-core's optimizers."""
    return [torch_optimizer for part in parts for torch_optimizer in part.updater.torch_optimizers]


def step_count(parts: Sequence[OptimizerPart]) -> int:
    """Return the number of updates made, where the optimizer counts them, else 0; the same for all parameters.

    It waits once for each device that counts, not for each parameter.
    """
    counts, of_device = {0}, defaultdict[torch.device, list[torch.Tensor]](list)
    for torch_optimizer in _torch_optimizers(parts):
        for state in torch_optimizer.state.values():
            if "step" in state:
                step = torch.as_tensor(state["step"])
                of_device[step.device].append(step)
        counts |= {int(group["step"]) for group in torch_optimizer.param_groups if "step" in group}
    counts |= {int(step) for steps in of_device.values() for step in torch.stack(steps).tolist()}
    assert len(counts - {0}) <= 1, f"parameters differ in their number of updates: {counts}"
    return max(counts)


def set_step_count(parts: Sequence[OptimizerPart], config: OptimizerConfig, count: int) -> None:
    """Set the number of updates. Every parameter gets a tensor of its own: a shared one would be advanced once for
    each."""
    traits = traits_of(config)
    for torch_optimizer in _torch_optimizers(parts):
        for group in torch_optimizer.param_groups:
            if not traits.updating(group.get("update")).counts_updates:
                continue
            if is_torchs(torch_optimizer, config):
                for main in group["params"]:
                    state = torch_optimizer.state[main]
                    is_tensor = torch.is_tensor(state["step"])
                    state["step"] = (
                        torch.full_like(state["step"], float(count)) if is_tensor else type(state["step"])(count)
                    )
            elif count:
                group["step"] = count  # apex's and Transformer Engine's count per group


def numbers(parts: Sequence[OptimizerPart], config: OptimizerConfig) -> dict[str, float]:
    """Return the numbers that the optimizer keeps besides its states and the update count, the same for all
    parameters."""
    names = traits_of(config).numbers
    states = (state for torch_optimizer in _torch_optimizers(parts) for state in torch_optimizer.state.values())
    return next(({name: float(state[name]) for name in names} for state in states if names and names[0] in state), {})


def set_numbers(parts: Sequence[OptimizerPart], config: OptimizerConfig, values: Mapping[str, float]) -> None:
    """Restore the numbers that `numbers` returned, for each parameter one of its own."""
    traits = traits_of(config)
    for torch_optimizer in _torch_optimizers(parts) if values else ():
        for state in torch_optimizer.state.values():
            state |= {name: scalar(traits, name, value) for name, value in values.items()}


def initialize_state(part: OptimizerPart, config: OptimizerConfig) -> None:
    """Give parameters that were never updated the state that the first update begins from."""
    for torch_optimizer in part.updater.torch_optimizers:
        for group in torch_optimizer.param_groups:
            for main in group["params"]:
                begin_state(main, group, torch_optimizer, config)


def own_state(
    part: OptimizerPart, config: OptimizerConfig
) -> Iterator[tuple[torch.nn.Parameter, dict[str, torch.Tensor]]]:
    """Yield for every weight of this rank the tensors of its state; with the distributed optimizer, this rank's
    shards. What is kept once for all rows or columns (`State.along`) is a view that repeats it."""
    for parameter, main in part.main_parameters():
        torch_optimizer, updated = part.updater.updated_by(main)
        state = torch_optimizer.state[updated]
        tensors = {name: state[name] for name in traits_of(config).state_names(config) if name in state}
        for name, kept in tensors.items():
            if kept.shape != updated.shape:
                tensors[name] = kept.expand_as(in_shape(updated))
        if part.saves_master(parameter):
            tensors[MASTER] = part.updater.master_of(main)
        yield parameter, tensors


def once(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return the part of a tensor that `like` (by default itself) repeats, or the tensor where that repeats nothing."""
    strides = (tensor if like is None else like).stride()
    return tensor[tuple(slice(1 if stride == 0 else None) for stride in strides)] if 0 in strides else tensor


def _written_by(tensor: Any, replica: int, rank: int) -> Any:
    """Return the same tensor for the engine, which takes the replica of data-parallel rank 0 for the one to be
    written."""
    *others, _ = tensor.replica_id
    # With several instances of the optimizer, each has all of the state; it is written by the ranks of the first.
    return replace(tensor, replica_id=(*others, replica - rank))


def _pieces(weight: Any, shards: Sequence[RowShard], values: torch.Tensor, key: str) -> Pieces:
    """Return the sharded tensors that save the values of consecutive rows, or into which to load them, shard by
    shard."""
    tensors: list[ShardedTensor] = []
    for shard in shards:
        own = values[shard.first - shards[0].first : shard.stop - shards[0].first]
        tensors += pieces(weight, shard, own, key).values()
    return {str(index): piece for index, piece in enumerate(tensors)}


def _like_weights(
    values: Mapping[int, State], weights: Mapping[str, Any], rows: Mapping[int, Sequence[RowShard] | None]
) -> Contents:
    """Cut every tensor as its weight is cut. Weights without values (another rank writes them) are left out.

    Args:
        rows: rows of each weight that its values cover, by the keys of `values`; None where they cover all rows.
    """
    contents: Contents = {}
    for name, weight in weights.items():
        for state, tensor in values.get(id(weight.data), {}).items():
            key = f"optimizer.state.{state}.{weight.key}"
            shards = rows[id(weight.data)]
            if shards is not None:
                if tensor.numel():
                    contents.setdefault(state, {})[name] = _pieces(weight, shards, tensor, key)
                continue
            changes: dict[str, Any] = {"key": key, "data": tensor}
            if not isinstance(weight, ShardedTensorFactory):
                changes["dtype"] = tensor.dtype
            contents.setdefault(state, {})[name] = replace(weight, **changes)
    return contents
