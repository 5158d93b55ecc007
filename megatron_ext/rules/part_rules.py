"""Rules about the parts of layers: each part names the flags that it cannot be computed with."""

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase

from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.config.parse.options import options_by_name
from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config
from megatron_ext.parts.catalogue import kinds_of_parameters, parameters
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.stack import Layer, stack
from megatron_ext.parts.update_factors import read_group
from megatron_ext.parts.ways import RECOMPUTATIONS, refusals
from megatron_ext.rules.reads import all_read_the_layout, reads


def parts_are_computed(config: Config, facts: Facts) -> Iterator[str]:
    """Require that every part of every layer can be computed in the ways that the flags ask for."""
    yield from _of_kinds(config, lambda kind: kind.cannot(config))


@reads("recomputation")
def parts_are_computed_again(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the modules of the recomputation flags can be computed again in the backward pass."""
    yield from _of_kinds(config, lambda kind: refusals(config, kind.pieces(config), RECOMPUTATIONS))


def groups_name_weights(config: Config, facts: Facts) -> Iterator[str]:
    """Require of each group with a rate or weight decay of its own a factor, a weight, and all experts of a layer or
    none: these may be one stack."""
    optimizer = config.optimizer
    groups = {"--lr-group": optimizer.lr_group, "--weight-decay-group": optimizer.weight_decay_group}
    known = parameters(config) if any(groups.values()) and _has_sizes(config) else []
    for flag, text in ((flag, text) for flag, texts in groups.items() for text in texts or ()):
        fix = f"use {flag} 'decoder.layers.*=0.5', or leave it out"
        try:
            pattern, _ = read_group(text)
        except ValueError:
            yield f"{flag} {text} is no PATTERN=FACTOR with a factor of at least 0; {fix}"
            continue
        named = {parameter.name for parameter in known if fnmatchcase(parameter.name, pattern)}
        if known and not named:
            yield f"{flag} {text} names no weight: the first is {known[0].name}, the last {known[-1].name}; {fix}"
        of_experts = {(*_stacked(one), one.name in named) for one in known if one.expert is not None}
        if len({(layer, name) for layer, name, _ in of_experts}) < len(of_experts):
            yield f"{flag} {text} names some experts of a layer, which are updated together; {fix}"


def matrices_have_a_rule(config: Config, facts: Facts) -> Iterator[str]:
    """Require, for an optimizer of whole matrices, that every parameter's part says whether it is a matrix."""
    traits = traits_of(config.optimizer)
    if not traits.needs_whole_matrices or not _has_sizes(config):
        return
    for parameter in (one for one, _ in kinds_of_parameters(config) if one.update_is_unknown):
        yield (
            f"--optimizer {traits.name} updates whole matrices, and nothing says whether {parameter.name} "
            f"{list(parameter.shape)} is one; list it as Parameter(..., by_element=False) where rows and columns are "
            "channels, else by_element=True; or use --optimizer adam"
        )


def _has_sizes(config: Config) -> bool:
    """Return whether the model's sizes, which other rules look at, are such that its parameters can be listed."""
    model = config.model
    sizes = (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.num_attention_heads, model.kv_channels)
    return positive(*sizes, model.padded_vocab_size, config.data.vocab_size)


def _stacked(parameter: Parameter) -> tuple[object, str]:
    """Return the key that an expert's matrix shares with the same matrix of the other experts of its layer."""
    return parameter.stage, parameter.name.rpartition(f".{parameter.expert}.")[2]


def _of_kinds(config: Config, problems: Callable[[Layer], Iterator[str]]) -> Iterable[str]:
    layers = config.model.num_layers
    if not positive(layers) or layers > (options_by_name()["num_layers"].at_most or layers):
        return ()
    # Layers of several kinds may lack the same.
    return dict.fromkeys(problem for kind, _ in stack(config).kinds for problem in problems(kind))


RULES = all_read_the_layout((parts_are_computed, parts_are_computed_again, groups_name_weights, matrices_have_a_rule))
