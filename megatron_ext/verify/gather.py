"""Gathers whole tensors by global parameter name, from the shards that the ranks of any layout hold.

On the ranks, `weights(run)` and `gradients(run)` return this rank's shards; in the parent, `assemble` puts those of
all ranks together, so that two layouts can be compared tensor by tensor.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_ext.config.schema import Config
from megatron_ext.model.names import by_expert, global_named_parameters, is_of_an_expert
from megatron_ext.parallel.groups import tensor_group
from megatron_ext.parallel.rows import row_shard
from megatron_ext.parts.catalogue import Parameter, parameters
from megatron_ext.parts.slices import pieces
from megatron_ext.train.run import Run


@dataclass(frozen=True)
class Shard:
    """One tensor-parallel rank's part of a named tensor, in fp32."""

    name: str
    tp_rank: int
    """Rank among those that share its matrices: for a routed expert, those of expert tensor parallelism."""
    values: np.ndarray


def weights(run: Run) -> list[Shard]:
    """Return this rank's shards of the weights."""
    with run.gathered_parameters():
        return [
            _shard(run, inner, tensor)
            for name, parameter in global_named_parameters(run.chunks)
            for inner, tensor in by_expert(name, _whole(run, parameter))
        ]


def gradients(run: Run) -> list[Shard]:
    """Return this rank's shards of the reduced gradients, before clipping. All data-parallel ranks must call it."""
    names = {id(parameter): name for name, parameter in global_named_parameters(run.chunks)}
    return [
        _shard(run, name, tensor)
        for chunk in run.chunks
        for parameter, gradient in run.sharding.reduced_gradients(chunk)
        for name, tensor in by_expert(names[id(parameter)], gradient)
    ]


def _whole(run: Run, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the weight as the forward pass computes with it: in the model's dtype, gathered where it is sharded."""
    shard = row_shard(parameter)
    return parameter.data if shard is None else shard.gather().to(run.transformer_config.params_dtype)


def _shard(run: Run, name: str, tensor: torch.Tensor) -> Shard:
    group = tensor_group(run.groups, expert=is_of_an_expert(name))
    return Shard(name, group.rank(), copied(tensor))


def copied(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor in fp32, copied. numpy must never see the tensor's own memory: that could not be freed by
    resizing it afterwards, as recomputation does."""
    return tensor.detach().to("cpu", torch.float32, copy=True).numpy()


def assemble(config: Config, shards: Iterable[Shard]) -> tuple[dict[str, np.ndarray], list[str]]:
    """Put the shards of all ranks together.

    Returns:
        Whole tensors by name, in the order of a forward pass, without vocabulary padding, so that any two layouts
        have the same shapes; and what is wrong with them: a tensor that several ranks hold and disagree on (the
        lowest rank's is returned), or padding that is not zero.
    """
    by_name: dict[str, dict[int, np.ndarray]] = {}
    problems = []
    for shard in shards:
        seen = by_name.setdefault(shard.name, {}).setdefault(shard.tp_rank, shard.values)
        if not np.array_equal(seen, shard.values, equal_nan=True):
            problems.append(f"{shard.name}: ranks disagree")
    tensors = {}
    for parameter in parameters(config):
        parts = by_name.pop(parameter.name)
        whole = _join(parameter, [parts[rank] for rank in sorted(parts)])
        if parameter.tp_dim is None and not all(np.array_equal(whole, part, equal_nan=True) for part in parts.values()):
            problems.append(f"{parameter.name}: tensor-parallel ranks disagree")
        if parameter.true_rows is not None and np.any(whole[parameter.true_rows :]):
            problems.append(f"{parameter.name}: vocabulary padding is not zero")
        tensors[parameter.name] = whole[: parameter.true_rows] if parameter.true_rows is not None else whole
    assert not by_name, f"not in the catalogue: {sorted(by_name)}"
    return tensors, list(dict.fromkeys(problems))


def _join(parameter: Parameter, parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if parameter.tp_dim is None else joined(parts, parameter.tp_dim, parameter.tp_stride)


def joined(shards: Sequence[np.ndarray], axis: int, stride: int) -> np.ndarray:
    """Return the whole tensor whose shards along `axis` these are, in the order of the tensor-parallel ranks."""
    shape = list(shards[0].shape)
    shape[axis] *= len(shards)
    whole = np.empty(shape, shards[0].dtype)
    for rank, shard in enumerate(shards):
        for start, in_shard, size in pieces(shape[axis], stride, rank, len(shards)):
            whole[_along(axis, start, size)] = shard[_along(axis, in_shard, size)]
    return whole


def _along(axis: int, start: int, size: int) -> tuple[slice, ...]:
    """Return the index of some places of one axis, and of all of the others."""
    return (*(slice(None),) * axis, slice(start, start + size))
