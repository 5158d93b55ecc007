"""Gives a drawn model the shape of a family of Hugging Face near it, so that its run can be exported.

    pieces = bent(random, pieces, config)      # flags of the same model, but for those that no file of the family says

Of the flags of a model that is drawn at random hardly one in ten says what some family's config.json can say.
"""

import dataclasses
import shlex
from collections.abc import Sequence
from random import Random
from typing import Any

from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.parts.stack import layers
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.registry import FAMILIES, obstacles

_NEAREST = 12
"""Number of the nearest families of which one is drawn."""


def bent(random: Random, pieces: Sequence[str], config: Config) -> tuple[str, ...]:
    """Return the pieces of a model with the flags of a family that is drawn from those nearest to it.

    Args:
        config: configuration of the model in one process.
    """
    near = sorted(FAMILIES.values(), key=lambda family: (len(obstacles(config, family)), random.random()))
    return with_flags_of(random.choice(near[:_NEAREST]), pieces, config)


def with_flags_of(family: Family, pieces: Sequence[str], config: Config) -> tuple[str, ...]:
    """Return the pieces without flags that contradict the family's, and with its own. They may still be refused, or
    lack something that the family needs.

    Args:
        config: configuration of the pieces in one process.
    """
    model = config.model
    wanted: dict[str, Any] = {"mtp_num_layers": None}
    for _ in range(2):  # what depends on other flags may depend on one of the family
        wanted |= {**family.fixed, **family.dependent_flags(dataclasses.replace(model, **wanted))}
    changed = {name: value for name, value in wanted.items() if getattr(model, name) != value}
    if model.is_sinkhorn:
        changed |= {"moe_router_load_balancing_type": None, "moe_aux_loss_coeff": None}
    if changed.get("hybrid_layer_pattern", "none") is None:
        changed["num_layers"] = len(layers(config))  # which the pattern said
    kept = (_without(piece, {*map(flag_of, changed)}) for piece in pieces)
    usual = {one.name: one.default for one in dataclasses.fields(ModelConfig)}
    own = [_said(name, value) for name, value in changed.items() if value != usual[name]]
    return (*(piece for piece in kept if piece), *own, f"--hf-model-type {family.model_type}")


def _said(name: str, value: Any) -> str:
    """Return a flag with its value."""
    if value is True:
        return flag_of(name)
    values = value if isinstance(value, tuple) else (value,)
    return shlex.join([flag_of(name), *(str(one) for one in values)])


def _without(piece: str, flags: set[str]) -> str:
    """Return a piece without some of its flags and without their values."""
    kept, drops = [], False
    for word in shlex.split(piece):
        drops = word in flags if word.startswith("--") else drops
        if not drops:
            kept.append(word)
    return shlex.join(kept)
