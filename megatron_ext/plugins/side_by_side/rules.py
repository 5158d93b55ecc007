"""Rule for --mixer-multipliers, the factors of attention and Mamba-2 in layers that have both."""

from collections.abc import Iterator

from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config, flags_of
from megatron_ext.plugins.mamba.flags import BESIDE_ATTENTION
from megatron_ext.plugins.side_by_side.flags import SideBySideFlags
from megatron_ext.rules.suggest import wrong_factors


def every_multiplier_is_given(config: Config, facts: Facts) -> Iterator[str]:
    """Require a factor of each mixer, above 0, and that there is a layer with both."""
    factors, has_any = (
        flags_of(config.model, SideBySideFlags).mixer_multipliers,
        BESIDE_ATTENTION in (config.model.hybrid_layer_pattern or ""),
    )
    yield from wrong_factors("mixer_multipliers", factors, 2, has_any, "a letter B in --hybrid-layer-pattern")


RULES = (every_multiplier_is_given,)
