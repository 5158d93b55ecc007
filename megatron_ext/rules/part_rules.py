"""Rules about what layers are made of: each part says what it cannot be computed with."""

from collections.abc import Callable, Iterable, Iterator

from megatron_ext.config.parse.options import options_by_name
from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config
from megatron_ext.parts.stack import Layer, stack
from megatron_ext.parts.ways import RECOMPUTATIONS, refusals


def parts_are_computed(config: Config, facts: Facts) -> Iterator[str]:
    """Require that every part of every layer can be computed in the ways that the flags ask for."""
    yield from _of_kinds(config, lambda kind: kind.cannot(config))


def parts_are_computed_again(config: Config, facts: Facts) -> Iterator[str]:
    """Require that what the flags ask for can be computed again in the backward pass."""
    yield from _of_kinds(config, lambda kind: refusals(config, kind.pieces(config), RECOMPUTATIONS))


def _of_kinds(config: Config, problems: Callable[[Layer], Iterator[str]]) -> Iterable[str]:
    layers = config.model.num_layers
    if not positive(layers) or layers > (options_by_name()["num_layers"].at_most or layers):
        return ()
    # Layers of several kinds may lack the same.
    return dict.fromkeys(problem for kind, _ in stack(config).kinds for problem in problems(kind))


RULES = (parts_are_computed, parts_are_computed_again)
