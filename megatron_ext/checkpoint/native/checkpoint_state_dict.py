"""Defines the contents of a checkpoint, as the state dict that megatron-core's dist_checkpointing reads and writes.

Tensors are saved once for the whole model, by global name and place, so that no layout shows in them. The state of
the random generators is saved for every rank, by its place in the grid of ranks, and can only be used in that grid.
"""

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)

from megatron_ext.checkpoint.native import optimizer_state
from megatron_ext.checkpoint.native.optimizer_state import joined, pieces
from megatron_ext.checkpoint.native.snapshot import Copy, Saveable
from megatron_ext.config.derived.optimizer_traits import AVERAGE
from megatron_ext.model.names import unwrapped
from megatron_ext.model.own_layers import divided
from megatron_ext.optim.loss_scale import loss_scale_of
from megatron_ext.parallel.groups import as_stage
from megatron_ext.parallel.rows import RowShard, row_shard
from megatron_ext.parts import own_parameters
from megatron_ext.sharding.parts import Exchange, OptimizerPart

# Facts about the tensors' names and cuts that megatron-core's readers ask for.
CONTENT_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": False,
}


OWN_PARAMETERS = "own_parameters"
"""Key of the names of parameters that a user's own layers have, where they have any."""


@dataclass
class Contents:
    """The model chunks' part of the state dict, with the names, row shards and replicas of its weights."""

    state_dict: ShardedStateDict
    weights: dict[str, ShardedBase]
    """This rank's weights by name, part of the state dict: the optimizer's state is cut as they are."""
    names: dict[int, str]
    """Name of each weight by its parameter's id(). megatron-core takes the parameters out of `weights` on loading."""
    rows: dict[str, RowShard]
    """Row shards of the weights that this rank holds in part, by name."""
    replicas: dict[str, int] = field(default_factory=dict)
    """Data-parallel rank of this rank's replica of a weight, where another one than the first is to write the
    weight."""


@dataclass
class RunSnapshot:
    """All of a run that a checkpoint holds, at one moment: its tensors as `copy` returned them, and numbers."""

    models: Contents
    """The run's own weights, not copied."""
    state_dict: ShardedStateDict
    """State dict of the models, with the tensors that `copy` returned."""
    optimizer: list[optimizer_state.OptimizerSnapshot]
    others: dict[str, Any]


def take(run: Saveable, copy: Copy, models: Contents | None = None) -> RunSnapshot:
    """Copy everything of `run` that a resumed run needs, except the parts that the flags leave out. Not collective.

    Args:
        copy: makes a tensor that the training does not change, from a name of it and the tensor; those that other
            ranks write are not copied.
        models: of an earlier save of this run, which saves the time to ask the modules once more.
    """
    if models is None or models.rows or not _of_the_run(models, run):
        models = models_of(run)
        if run.config.checkpoint.ckpt_fully_parallel_save and not models.rows:  # rows are written by who has them
            _spread(models, run)
    state_dict = {key: _copied(value, copy, (key,)) for key, value in models.state_dict.items()}
    others: dict[str, Any] = {"train_state": asdict(run.state), "iteration": run.state.iteration}
    if own := own_parameters.names(run.config):
        others[OWN_PARAMETERS] = own
    snapshot = []
    if not run.config.checkpoint.no_save_optim:
        written = {
            id(weight.data)
            for weight in models.weights.values()
            if is_main_replica(weight.replica_id)  # pyright: ignore[reportAttributeAccessIssue]
        }
        snapshot = optimizer_state.take(optimizer_parts(run), run.config.optimizer, copy, written)
        others |= {
            "optimizer_step": optimizer_state.step_count(optimizer_parts(run)),
            "optimizer_numbers": optimizer_state.numbers(optimizer_parts(run), run.config.optimizer),
            "grad_scaler": grad_scaler_state(run),
        }
    if not run.config.checkpoint.no_save_rng:
        others |= {"rng_grid": rng_grid(run), "rng_state": _rng_state(run)}
    return RunSnapshot(models, state_dict, snapshot, others)


def to_save(snapshot: RunSnapshot, exchange: Exchange) -> ShardedStateDict:
    """Return the sharded state dict that this rank writes. Collective over the data-parallel ranks where they have
    shards of the optimizer."""
    state_dict = {**snapshot.state_dict, **snapshot.others}
    if snapshot.optimizer:
        state_dict["optimizer"] = optimizer_state.state_to_save(
            snapshot.optimizer, snapshot.models.weights, snapshot.models.replicas, exchange
        )
    return state_dict


def _spread(models: Contents, run: Saveable) -> None:
    """Divide the writing of the weights among the data-parallel ranks that hold the same ones, each about as many
    bytes.

    The ranks that hold a weight count alike, since they hold the same weights under the same names.
    """
    loads: dict[Any, list[int]] = {}
    ordered: Any = sorted(models.weights.items(), key=lambda item: (-item[1].data.numel(), item[0]))  # pyright: ignore[reportAttributeAccessIssue]
    for name, weight in ordered:
        group = run.groups.dp_cp if getattr(weight.data, "allreduce", True) else run.groups.expt_dp
        load = loads.setdefault(group, [0] * group.size())
        writer = load.index(min(load))
        load[writer] += weight.data.numel()
        *others, replica = weight.replica_id
        models.replicas[name] = replica
        weight.replica_id = (*others, (replica - writer) % group.size())


def _of_the_run(models: Contents, run: Saveable) -> bool:
    """Return whether all tensors lie in the memory that the run has now: a module may have made one for its state
    dict."""
    chunks = [*_chunks(run).values()]
    own = {
        tensor.untyped_storage().data_ptr() for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())
    }
    return all(
        value.data.untyped_storage().data_ptr() in own
        for value in nested_values(models.state_dict)
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and value.data is not None
    )


def _copied(value: Any, copy: Copy, name: tuple[Any, ...]) -> Any:
    """Return the state dict with copies of its tensors, except tensors that another rank writes."""
    if isinstance(value, dict):
        return {key: _copied(inner, copy, (*name, key)) for key, inner in value.items()}
    if not isinstance(value, ShardedTensor | ShardedTensorFactory):
        return value
    if value.data is None or not is_main_replica(value.replica_id):
        return replace(value)
    return replace(value, data=copy(name, value.data.detach()))


def size(state_dict: ShardedStateDict) -> int:
    """Return the bytes of the tensors that this rank writes: one of the ranks that hold a tensor writes it."""
    return sum(
        value.data.numel() * value.data.element_size()
        for value in nested_values(state_dict)
        if isinstance(value, ShardedTensor | ShardedTensorFactory)
        and value.data is not None
        and is_main_replica(value.replica_id)
    )


@dataclass(frozen=True)
class Parts:
    """Selects the parts of a checkpoint to use, besides the weights."""

    optimizer: bool
    rng: bool
    progress: bool
    """Iteration, position in the data, and the sums of the current logging interval."""

    averages: bool = True
    """Averages of the weights, where the run keeps them."""

    masters: bool = False
    """The fp32 masters of 16-bit weights; they belong to the optimizer, too."""


def to_load(run: Saveable, parts: Parts) -> Contents:
    """Return the state dict into which to read the tensors of a checkpoint."""
    contents = models_of(run)
    if parts.optimizer:
        contents.state_dict["optimizer"] = optimizer_state.state_to_load(
            optimizer_parts(run), run.config.optimizer, contents.weights
        )
        if not parts.averages:
            contents.state_dict["optimizer"].pop(AVERAGE, None)
    if parts.rng:
        contents.state_dict["rng_state"] = _rng_state(run)
    return contents


def add_masters(run: Saveable, contents: Contents) -> None:
    """Add tensors into which to read the fp32 masters of 16-bit weights, without the rest of the optimizer's state."""
    contents.state_dict["optimizer"] = optimizer_state.state_to_load(
        optimizer_parts(run), run.config.optimizer, contents.weights, masters_alone=True
    )


def restore(run: Saveable, contents: Contents, parts: Parts, loaded: dict[str, Any]) -> None:
    """Put the state that was read into `run`."""
    for key, chunk in _chunks(run).items():
        if not contents.rows:
            chunk.load_state_dict(loaded[key])
        else:
            for name, buffer in chunk.named_buffers():
                if name in loaded[key]:
                    buffer.copy_(loaded[key][name])
    # Rows are the masters themselves: where those are loaded, they are not rounded to 16 bits.
    with_masters = (parts.optimizer or parts.masters) and _dtype(run) != torch.float32
    for name, shard in contents.rows.items():
        key, _, inner = name.partition(".")
        if shard.local.numel() and not with_masters:
            shard.local.copy_(joined(shard, loaded[key][inner]))
    if parts.optimizer or parts.masters:
        optimizer_state.restore(optimizer_parts(run), run.config.optimizer, contents.names, loaded.get("optimizer", {}))
    if contents.rows or not (parts.optimizer or parts.masters):
        # Into the fp32 copies of 16-bit weights; where rows are the masters, from rows to weights.
        run.sharding.reload_masters(run.optimizer)
    if parts.optimizer:
        optimizer_state.set_step_count(optimizer_parts(run), run.config.optimizer, loaded["optimizer_step"])
        optimizer_state.set_numbers(optimizer_parts(run), run.config.optimizer, loaded.get("optimizer_numbers", {}))
        set_grad_scaler(run, loaded["grad_scaler"])
    if parts.progress:
        names = {field.name for field in fields(run.state)}
        for name, value in loaded["train_state"].items():
            if name in names:
                setattr(run.state, name, value)
        if not parts.optimizer:
            run.state.scheduled_samples = 0  # as Megatron-LM: the curve's position goes with the optimizer
    if parts.rng:
        run.device.set_rng_state(loaded["rng_state"]["dropout"])
        random_tracker().set_states(loaded["rng_state"]["tracker"])


def rng_grid(run: Saveable) -> list[int]:
    """Return the sizes of the grid in which every rank has a place of its own: pipeline, data, tensor."""
    return [run.groups.pp.size(), run.groups.dp_cp.size(), run.groups.tp.size()]


def _rng_state(run: Saveable) -> ShardedObject:
    coordinates = (run.groups.pp.rank(), run.groups.dp_cp.rank(), run.groups.tp.rank())
    # The engine gives a generator a new tensor whenever it has drawn: these stay as they are.
    state = {"dropout": run.device.rng_state(), "tracker": random_tracker().get_states()}
    return ShardedObject("rng_state", state, tuple(rng_grid(run)), coordinates)


def random_tracker() -> Any:
    """Return the engine's generators of dropout, by name."""
    return tensor_parallel.get_cuda_rng_tracker()


def _chunks(run: Saveable) -> dict[str, Any]:
    """Return the model chunks without their wrappers, under Megatron-LM's names."""
    chunks = unwrapped(run.chunks)
    return {"model": chunks[0]} if len(chunks) == 1 else {f"model{index}": chunk for index, chunk in enumerate(chunks)}


def models_of(run: Saveable) -> Contents:
    """Return the model chunks alone, by reference."""
    metadata = {**CONTENT_METADATA, "dp_cp_group": run.groups.dp_cp}
    state_dict, weights = {}, {}
    for key, chunk in _chunks(run).items():
        # Named stages may lie like a V: megatron-core counts a chunk's layers by the stage of the process.
        with as_stage(run.groups, chunk.pg_collection.pp.rank()):
            saved = chunk.sharded_state_dict(metadata=metadata)
        state_dict[key] = {
            name: divided(value, run.groups.tp) if isinstance(value, ShardedTensor) else value
            for name, value in saved.items()
        }
        weights |= {
            f"{key}.{name}": value
            for name, value in state_dict[key].items()
            if isinstance(value, ShardedTensor | ShardedTensorFactory)
        }
    names = {id(weight.data): name for name, weight in weights.items()}
    rows = {name: shard for name, weight in weights.items() if (shard := row_shard(weight.data)) is not None}
    for name, shard in rows.items():
        key, _, inner = name.partition(".")
        weight = weights[name]
        if not shard.local.numel():
            del state_dict[key][inner]  # an empty entry would be saved, as one of all ranks
            continue
        state_dict[key][inner] = pieces(weight, shard, shard.local.to(_dtype(run)), weight.key)
    return Contents(state_dict, weights, names, rows)


def _dtype(run: Saveable) -> torch.dtype:
    """Return the dtype in which a checkpoint holds the weights: the dtype of the forward pass. Their fp32 masters are
    optimizer state."""
    return getattr(torch, run.config.training.params_dtype)


def optimizer_parts(run: Saveable) -> list[OptimizerPart]:
    """Return the parts of the run's optimizer that update weights on this rank."""
    return run.sharding.parts(run.optimizer)


def grad_scaler_state(run: Saveable) -> dict[str, float | int]:
    """Return the state of the dynamic loss scale; empty without one."""
    loss_scale = loss_scale_of(run.optimizer)
    return {} if loss_scale is None else loss_scale.state_dict()


def set_grad_scaler(run: Saveable, state: dict[str, float | int]) -> None:
    """Restore the state that `grad_scaler_state` returned, in this version or an earlier one."""
    loss_scale = loss_scale_of(run.optimizer)
    if state and loss_scale is not None:
        loss_scale.load_state_dict(state, run.config.training.global_batch_size * run.config.model.seq_length)
