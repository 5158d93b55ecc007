"""Values that the flags of Mamba-2 imply, and the rule for these flags next to others."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config, flags_of
from megatron_ext.plugins.mamba.flags import BESIDE_ATTENTION, LETTER, MambaFlags
from megatron_ext.rules.suggest import wrong_factors


def resolve(values: dict[str, Any], given: Mapping[str, Any]) -> None:
    """Fill in --mamba-num-heads where it is not given: 2 x --hidden-size / --mamba-head-dim."""
    hidden, head = values.get("hidden_size"), values.get("mamba_head_dim", MambaFlags.mamba_head_dim)
    if not values.get("hybrid_layer_pattern") or values.get("mamba_num_heads") is not None:
        return
    if isinstance(hidden, int) and positive(hidden, head) and 2 * hidden % head == 0:
        values["mamba_num_heads"] = 2 * hidden // head


def every_multiplier_is_given(config: Config, facts: Facts) -> Iterator[str]:
    """Require as many factors as there is to multiply, above 0, and that there is a layer of Mamba-2."""
    has_any = not {LETTER, BESIDE_ATTENTION}.isdisjoint(config.model.hybrid_layer_pattern or "")
    factors = flags_of(config.model, MambaFlags).mamba_multipliers
    yield from wrong_factors("mamba_multipliers", factors, 5, has_any, "a letter M or B in --hybrid-layer-pattern")


RESOLVERS = (resolve,)
RULES = (every_multiplier_is_given,)
