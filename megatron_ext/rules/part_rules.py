"""Rules about what layers are made of: each part says what it cannot be computed with."""

from collections.abc import Iterator

from megatron_ext.config.parse.options import options_by_name
from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config
from megatron_ext.parts.stack import stack


def parts_are_computed(config: Config, facts: Facts) -> Iterator[str]:
    """Require that every part of every layer can be computed in the way that the flags ask for."""
    layers = config.model.num_layers
    if not positive(layers) or layers > (options_by_name()["num_layers"].at_most or layers):
        return
    for kind, _ in stack(config).kinds:
        for branch in kind.branches:
            yield from branch.part.cannot(config)


RULES = (parts_are_computed,)
