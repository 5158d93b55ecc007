"""Says which kind of mixer a layer has: attention, unless a plugin's kind is asked for by its letter or its flags.

A plugin brings `Mixer` objects to the extension point `mixers`. What builds the module of a mixer stands at its
description (`Part.builder`), next to its operation.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.config.derived.layer_patterns import ATTENTION, EXPERTS, MLP, PIPE
from megatron_ext.config.schema import ModelConfig
from megatron_ext.errors import ConfigurationError, PluginError
from megatron_ext.parts.attention.describe import attention_of
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.parts.protocol import Part
from megatron_ext.registry import brought, objects_of, plugins

_PAGE = "(docs/own_mixer.md)"
_NEEDED = ("parameters", "products", "held")
"""Methods that every description of a mixer has of its own."""


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


@functools.cache
def mixers() -> tuple[Mixer, ...]:
    """Return the kinds of mixers that plugins bring.

    Raises:
        PluginError: one is no `Mixer`, or has a letter that cannot be, or that another kind has.
    """
    taken: dict[str, str] = dict.fromkeys((ATTENTION, MLP, EXPERTS, PIPE), "the core")
    for plugin in plugins().values():
        for kind in objects_of(plugin, "mixers"):
            who = f"plugin {plugin.name}: its mixer"
            if not isinstance(kind, Mixer):
                raise PluginError(f"{who} is {type(kind).__name__}; bring a tuple of Mixer(LETTER, describe) {_PAGE}")
            if len(kind.letter) != 1 or not kind.letter.isprintable() or kind.letter.isspace():
                raise PluginError(f"{who} has the letter {kind.letter!r}; give it one character, as 'R' {_PAGE}")
            if kind.letter in taken:
                raise PluginError(f"{who} has the letter {kind.letter!r} of {taken[kind.letter]}; take another {_PAGE}")
            taken[kind.letter] = f"plugin {plugin.name}"
    return brought("mixers")


def described(kind: Mixer, model: ModelConfig, norm: Norm, number: int) -> Part:
    """Return the description of a layer's mixer.

    Raises:
        ConfigurationError: the kind describes it by something else than a `Part`, its builder cannot be imported, or
            the description lacks a method.
    """
    who = f"the mixer of the letter {kind.letter!r}"
    if not _takes(kind.describe, model, norm, number):
        raise ConfigurationError(
            f"{who} has a `describe` that does not take (model, norm, number): the ModelConfig, the Norm before the "
            f"layer and the layer's number from 0; give it these three {_PAGE}"
        )
    part = kind.describe(model, norm, number)
    if not isinstance(part, Part):
        raise ConfigurationError(f"{who} is described by {type(part).__name__}; let `describe` return a Part {_PAGE}")
    module, colon, name = part.builder.partition(":")
    if not (module and colon and name) or _cannot_be_found(module):
        raise ConfigurationError(
            f"{who} has builder = {part.builder!r}, which is no function of a module; name it "
            f"'package.module:function' {_PAGE}"
        )
    lacking = [f"`{name}`" for name in _NEEDED if getattr(type(part), name) is getattr(Part, name)]
    if lacking:
        raise ConfigurationError(
            f"{who} is described by {type(part).__name__}, which lacks {' and '.join(lacking)}; define what it lacks "
            f"{_PAGE}"
        )
    return part


def _takes(function: Callable[..., object], *arguments: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a function of C that says nothing of its arguments
        pass
    return True


@functools.cache
def _cannot_be_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ImportError:
        return True


def mixer_of(model: ModelConfig, letter: str | None, number: int) -> Callable[[ModelConfig, Norm, int], Part]:
    """Return the function that describes the mixer of layer `number`.

    Args:
        letter: the layer's letter in --hybrid-layer-pattern; None without a pattern.
    """
    kinds = sorted(mixers(), key=lambda kind: kind.replaces_attention)
    for kind in kinds:
        if letter == kind.letter or (letter is None and kind.is_asked(model, number)):
            return functools.partial(described, kind)
    return attention_of


def attention_is_replaced(model: ModelConfig) -> bool:
    """Return whether a kind of mixer is in the place of all attention."""
    return any(kind.replaces_attention and kind.is_asked(model, 0) for kind in mixers())


def letters() -> str:
    """Return the letters of --hybrid-layer-pattern: the core's letters, and the letters of the installed mixers."""
    return ATTENTION + MLP + EXPERTS + "".join(kind.letter for kind in mixers())
