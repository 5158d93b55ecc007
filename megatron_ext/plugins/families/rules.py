"""Rule for --hf-model-type, the flag that names a family."""

import difflib
from collections.abc import Iterator

from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config, flags_of
from megatron_ext.plugins.families.flags import FamilyFlags


def type_is_known(config: Config, facts: Facts) -> Iterator[str]:
    """Require a type that is read and written."""
    named = flags_of(config.checkpoint, FamilyFlags).hf_model_type
    if named is None:
        return
    from megatron_ext.plugins.families.registry import FAMILIES  # with every family

    if named not in FAMILIES:
        [nearest] = difflib.get_close_matches(named, FAMILIES, 1, cutoff=0.0)
        yield f"--hf-model-type {named} is no type that is written; use --hf-model-type {nearest}"


RULES = (type_is_known,)
