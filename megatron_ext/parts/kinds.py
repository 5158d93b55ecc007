"""Says which kind of mixer a layer has: attention, unless a plugin's kind is asked for by its letter or its flags.

A plugin brings `Mixer` objects to the extension point `mixers`. What builds the module of a mixer stands at its
description (`Part.builder`), next to its operation.
"""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.config.derived.layer_patterns import ATTENTION, EXPERTS, MLP
from megatron_ext.config.schema import ModelConfig
from megatron_ext.parts.attention.describe import attention_of
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.parts.protocol import Part
from megatron_ext.registry import brought


@dataclass(frozen=True)
class Mixer:
    """A kind of token mixer that a plugin brings: a layer can have it in place of plain attention, as with Mamba-2."""

    letter: str
    """Its letter in --hybrid-layer-pattern."""

    describe: Callable[[ModelConfig, Norm, int], Part]
    """Returns the description of the mixer of layer `number`, whose norms are as given."""

    is_asked: Callable[[ModelConfig, int], bool] = lambda model, number: False
    """Whether the flags give it to layer `number` of a model without --hybrid-layer-pattern."""

    replaces_attention: bool = False
    """Whether its flags put it in the place of all attention; kinds that are chosen for single layers come first."""


def mixer_of(model: ModelConfig, letter: str | None, number: int) -> Callable[[ModelConfig, Norm, int], Part]:
    """Return the function that describes the mixer of layer `number`.

    Args:
        letter: the layer's letter in --hybrid-layer-pattern; None without a pattern.
    """
    kinds = sorted(brought("mixers"), key=lambda kind: kind.replaces_attention)
    for kind in kinds:
        if letter == kind.letter or (letter is None and kind.is_asked(model, number)):
            return kind.describe
    return attention_of


def attention_is_replaced(model: ModelConfig) -> bool:
    """Return whether a kind of mixer is in the place of all attention."""
    return any(kind.replaces_attention and kind.is_asked(model, 0) for kind in brought("mixers"))


def letters() -> str:
    """Return the letters of --hybrid-layer-pattern: the core's letters, and the letters of the installed mixers."""
    return ATTENTION + MLP + EXPERTS + "".join(kind.letter for kind in brought("mixers"))
