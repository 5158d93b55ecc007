"""Checks a user's own layers against the catalogue and the layout, marks their parameters for megatron-core, and checks
the results of their parts.

A class of a user's own says by `reads` what it needs to compute its output at a position:

- "token": its input at this position alone;
- "share": the positions that its rank holds; what it needs of others it gets by parts of ours that it calls, or by an
  exchange of its own;
- "sequence", where it says nothing: the whole sequence, which sequence and context parallelism would divide.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError, listed
from megatron_ext.model.names import by_expert, global_named_parameters
from megatron_ext.own_code import own_class, place_of
from megatron_ext.parts import own_parameters
from megatron_ext.parts.catalogue import Parameter, parameters
from megatron_ext.registry import packages_elsewhere

_READS = ("token", "share", "sequence")
_PAGE = "(docs/own_mixer.md)"
"""The page about classes of a user's own, for the end of messages."""

_BRANCHES = ("self_attention", "mlp")
"""Parts of a layer that return an output and a bias that is still to be added, or None."""

_OF_HIDDEN_STATES = ("", *_BRANCHES, "input_layernorm", "pre_mlp_layernorm")
"""Parts of a layer, and the layer itself, whose input and output are hidden states, [S, B, H]."""


@dataclass(frozen=True)
class OwnModule:
    """A module of a class of the user's own within a layer."""

    layer: int
    path: str
    """Its name in the layer; empty for the layer itself."""
    module: torch.nn.Module
    own: type
    """The user's class."""
    reads: str
    """The user's declaration: "token", "share" or "sequence"."""

    @property
    def title(self) -> str:
        """The class and where it is defined: `ShortConvolution (mine.py:12)`."""
        return f"{self.own.__name__} ({place_of(self.own)})"

    @property
    def place(self) -> str:
        """Its place in the model: `self_attention of layer 3`."""
        return f"{self.path} of layer {self.layer}" if self.path else f"layer {self.layer}"

    @property
    def has_hidden_states(self) -> bool:
        """Whether it takes and returns hidden states, [S, B, H]."""
        return self.path in _OF_HIDDEN_STATES


def of_plugins_elsewhere(chunks: Sequence[torch.nn.Module]) -> list[OwnModule]:
    """Return the modules of plugins of other distributions; raises as `own_modules`."""
    return own_modules(chunks) if packages_elsewhere() else []


def own_modules(chunks: Sequence[torch.nn.Module]) -> list[OwnModule]:
    """Return the user's own modules of all layers; of a module within another one, only the outer, which answers for
    both, unless the outer is the layer.

    Raises:
        ConfigurationError: one declares an unknown value of `reads`.
    """
    layers = (one for chunk in chunks for one in chunk.modules() if isinstance(one, TransformerLayer))
    found = []
    for layer in layers:
        within = [("", layer)] if own_class(layer) is not None else []
        within += [pair for name, child in layer.named_children() for pair in _outermost(name, child)]
        found += [_described(layer.layer_number - 1, path, module) for path, module in within]
    return found


def _outermost(path: str, module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    if own_class(module) is not None:
        yield path, module
        return
    for name, child in module.named_children():
        yield from _outermost(f"{path}.{name}", child)


def _described(layer: int, path: str, module: torch.nn.Module) -> OwnModule:
    own = own_class(module)
    assert own is not None
    reads = getattr(own, "reads", "sequence")
    found = OwnModule(layer, path, module, own, reads)
    if reads not in _READS:
        raise ConfigurationError(f"{found.title} has reads = {reads!r}; use {listed(map(repr, _READS))} {_PAGE}")
    return found


def check_own_modules(chunks: Sequence[torch.nn.Module], config: Config) -> None:
    """Check that the layout divides no sequence that a user's module reads whole; check the shapes that these modules
    return.

    Raises:
        ConfigurationError: it divides one; a module, once it is called, returns hidden states of another shape.
    """
    layout, found = config.layout, own_modules(chunks)
    divides = [f"--context-parallel-size {layout.context_parallel_size}"] * (layout.context_parallel_size > 1)
    divides += ["--sequence-parallel"] * layout.sequence_parallel
    whole = {one.own: one for one in reversed(found) if one.reads == "sequence"}
    if divides and whole:
        flags = " and ".join(divides)
        raise ConfigurationError(
            [
                f"{one.title}, {one.place}, reads whole sequences, of which {flags} gives each rank a part; declare "
                "reads = 'token' in the class if its output at a position depends on its input there alone, reads = "
                f"'share' if parts of ours, or an exchange of its own, bring it the other positions {_PAGE}; else "
                f"leave {flags} out"
                for one in whole.values()
            ]
        )
    for one in found:
        if one.has_hidden_states:
            one.module.register_forward_hook(partial(_check_output, one), with_kwargs=True)


def hidden_states_of(arguments: Sequence[Any], named: Mapping[str, Any]) -> torch.Tensor:
    """Return the hidden states among the arguments of a module that takes these, [S, B, H]."""
    return arguments[0] if arguments else named["hidden_states"]


def _check_output(
    one: OwnModule, module: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: object
) -> None:
    """Raise ConfigurationError where a user's module returns something else than hidden states shaped like its
    input."""
    if not module.training:  # what is read alone may go on in inference
        return
    pair = output if isinstance(output, tuple) else (output,)
    wanted, found = hidden_states_of(arguments, named).shape, getattr(pair[0], "shape", type(pair[0]).__name__)
    is_pair = one.path in ("", *_BRANCHES)
    if found == wanted and isinstance(output, tuple) == is_pair and len(pair) == 1 + is_pair:
        return
    returns = ("(output, bias or None)" if one.path else "(output, None)") if is_pair else "output"
    sizes = list(found) if isinstance(found, torch.Size) else found
    many = f"{len(pair)} values, the first of shape" if isinstance(output, tuple) else "a tensor of shape"
    raise ConfigurationError(
        f"{one.title}, {one.place}, returned {many} {sizes} for hidden states of shape {list(wanted)}: it must return "
        f"{returns}, with an output of shape {list(wanted)} {_PAGE}"
    )


def mark_own_parameters(chunks: Sequence[torch.nn.Module], config: Config, *, are_all_named: bool = False) -> None:
    """Set megatron-core's attributes of each of the user's own parameters, from the catalogue.

    Args:
        are_all_named: whether the catalogue has of the user's modules their own parameters alone, as of a plugin's
            mixer; else it may have parameters of standard parts that they replace.
    Raises:
        ConfigurationError: a layer has a parameter that the catalogue lacks, or lacks one, or has it in another shape.
    """
    found = {
        name: (weight, tensor.shape)
        for stacked, weight in global_named_parameters(chunks)
        for name, tensor in by_expert(stacked, weight.data)
    }
    catalogue = {parameter.name: parameter for parameter in parameters(config)}
    places = {f"decoder.layers.{one.layer}.{one.path}." for one in own_modules(chunks) if one.path}
    within = [name for name in catalogue if any(map(name.startswith, places))]
    named = _own(catalogue, config)
    problems = list(_differences(found, catalogue, config, [*named, *within] if are_all_named else named))
    if problems:
        raise ConfigurationError("\n".join(problems))
    for name in (*named, *within):
        if name in found:
            _mark(found[name][0], catalogue[name], sequence_parallel=config.layout.sequence_parallel)


def _own(catalogue: Mapping[str, Parameter], config: Config) -> list[str]:
    """Return the names in the catalogue that belong to the user's own parameters."""
    ends = tuple(f".{name}" for name in own_parameters.names(config))
    return [name for name, parameter in catalogue.items() if isinstance(parameter.stage, int) and name.endswith(ends)]


def _differences(
    found: Mapping[str, tuple[torch.nn.Parameter, torch.Size]],
    catalogue: Mapping[str, Parameter],
    config: Config,
    named: Sequence[str],
) -> Iterator[str]:
    for name, (_, shape) in found.items():
        if name not in catalogue:
            inner = name.split(".", 3)[-1]
            yield (
                f"the own layer has a parameter {name} of shape {list(shape)}, which nobody would initialize, divide "
                f"or save; let layer_parameters=, or the mixer's Part, name it: Parameter({inner!r}, "
                f"shape, layer.number, 'zeros') {_PAGE}"
            )
    held = {name.split(".")[2] for name in found if name.startswith("decoder.layers.")}
    for name in named:
        shape = catalogue[name].local_shape(config.layout.tensor_model_parallel_size)
        if name not in found and name.split(".")[2] in held:
            yield (
                f"layer_parameters=, or the mixer's Part, names {name}, which the own layer does not "
                f"have; give the layer that parameter {_PAGE}"
            )
        elif name in found and found[name][1] != shape:
            yield (
                f"{name} has shape {list(found[name][1])} on this rank, and layer_parameters=, or the mixer's "
                f"Part, says {list(shape)}; let both say the same {_PAGE}"
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
