"""Holds a user's own layers against the catalogue, and marks their parameters for the engine as it says."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.model.names import by_expert, global_named_parameters
from megatron_ext.parts import own_parameters
from megatron_ext.parts.catalogue import Parameter, parameters


def mark_own_parameters(chunks: Sequence[torch.nn.Module], config: Config) -> None:
    """Set what the engine wants to know of each own parameter, as the catalogue has it.

    Raises:
        ConfigurationError: a layer has a parameter that the catalogue lacks, or lacks one, or has it in another shape.
    """
    found = {
        name: (weight, tensor.shape)
        for stacked, weight in global_named_parameters(chunks)
        for name, tensor in by_expert(stacked, weight.data)
    }
    catalogue = {parameter.name: parameter for parameter in parameters(config)}
    problems = list(_differences(found, catalogue, config))
    if problems:
        raise ConfigurationError("\n".join(problems))
    for name in _own(catalogue, config):
        if name in found:
            _mark(found[name][0], catalogue[name], sequence_parallel=config.layout.sequence_parallel)


def _own(catalogue: Mapping[str, Parameter], config: Config) -> list[str]:
    """Return which names of the catalogue are those of own parameters."""
    ends = tuple(f".{name}" for name in own_parameters.names(config))
    return [name for name, parameter in catalogue.items() if isinstance(parameter.stage, int) and name.endswith(ends)]


def _differences(
    found: Mapping[str, tuple[torch.nn.Parameter, torch.Size]], catalogue: Mapping[str, Parameter], config: Config
) -> Iterator[str]:
    for name, (_, shape) in found.items():
        if name not in catalogue:
            inner = name.split(".", 3)[-1]
            yield (
                f"the own layer has a parameter {name} of shape {list(shape)}, which nobody would initialize, divide "
                f"or save; let layer_parameters= name it: Parameter({inner!r}, shape, layer.number, 'zeros')"
            )
    held = {name.split(".")[2] for name in found if name.startswith("decoder.layers.")}
    for name in _own(catalogue, config):
        shape = catalogue[name].local_shape(config.layout.tensor_model_parallel_size)
        if name not in found and name.split(".")[2] in held:
            yield f"layer_parameters= names {name}, which the own layer does not have; give the layer that parameter"
        elif name in found and found[name][1] != shape:
            yield (
                f"{name} has shape {list(found[name][1])} on this rank, and layer_parameters= says {list(shape)}; "
                "let both say the same"
            )


def _mark(weight: Any, parameter: Parameter, *, sequence_parallel: bool) -> None:
    if not hasattr(weight, "tensor_model_parallel"):  # the engine's own linear layers have marked theirs
        dim = -1 if parameter.tp_dim is None else parameter.tp_dim
        set_tensor_model_parallel_attributes(weight, dim >= 0, dim, 1)
    weight.sequence_parallel = parameter.sequence_parallel and sequence_parallel
    weight.own_layers_divided_dim = parameter.tp_dim


def divided(tensor: ShardedTensor, tp_group: ProcessGroup) -> ShardedTensor:
    """Return the tensor as a checkpoint is to hold it: the engine takes a parameter for whole that no linear layer of
    its own divides."""
    dim = getattr(tensor.data, "own_layers_divided_dim", None)  # that tensor parallelism divides
    if dim is None or tp_group.size() == 1:
        return tensor
    axis = tensor.prepend_axis_num + dim
    assert tensor.axis_fragmentations is not None
    if tensor.axis_fragmentations[axis] == tp_group.size():
        return tensor
    size = tensor.local_shape[dim]

    def at_axis(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:axis], value, *values[axis + 1 :])

    replicas: Any = tensor.replica_id  # of stages, of tensor-parallel ranks, of data-parallel ranks
    return replace(
        tensor,
        global_shape=at_axis(tensor.global_shape, size * tp_group.size()),
        global_offset=at_axis(tensor.global_offset, size * tp_group.rank()),
        axis_fragmentations=at_axis(tensor.axis_fragmentations, tp_group.size()),
        replica_id=(0, 0, replicas[2]),
    )
