"""Kinds of mixers that plugins bring: one that cannot be is named, with the page that shows how it is done."""

import re
from collections.abc import Iterator
from typing import Any, cast

import pytest

from megatron_ext.config.schema import ModelConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts import kinds
from megatron_ext.parts.kinds import Mixer, letters, mixer_of, mixers
from megatron_ext.parts.norm.describe import Norm
from megatron_ext.parts.parameter import Parameter
from megatron_ext.parts.protocol import Part, Place, Product, Share
from megatron_ext.registry import Plugin


class Unfinished(Part):
    """A description of nothing but its builder."""

    builder = "megatron_ext.parts.spec:layer_spec"


class Mean(Unfinished):
    """A description of nothing."""

    def parameters(self, place: Place) -> Iterator[Parameter]:
        yield from ()

    def products(self, share: Share) -> list[Product]:
        return []

    def held(self, share: Share) -> dict[str, float]:
        return {"core": 0.0}


class WithoutBuilder(Part):
    """A description that names no function."""

    builder = "megatron_ext.parts.nowhere:made"


@pytest.fixture
def bring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Let a plugin of the name own bring mixers, next to those that are installed."""
    installed = kinds.plugins()

    def brings(*brought: Any) -> None:
        own = {"own": Plugin("own", brings={"mixers": brought})}
        monkeypatch.setattr(kinds, "plugins", lambda: installed | own)
        monkeypatch.setattr(kinds, "brought", lambda point: brought)
        mixers.cache_clear()

    yield brings
    mixers.cache_clear()


def _described(part: Any) -> Mixer:
    return Mixer("R", lambda model, norm, number: part)


def test_a_letter_of_a_plugin_is_known_and_described(bring: Any) -> None:
    part = Mean()
    bring(_described(part))
    assert letters().endswith("R")
    model = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    assert mixer_of(model, "R", 0)(model, Norm("RMSNorm", 1e-5), 0) is part


@pytest.mark.parametrize(
    ("letter", "said"),
    [
        ("M", "plugin own: its mixer has the letter 'M' of plugin "),
        ("*", "plugin own: its mixer has the letter '*' of the core; take another"),
        ("RM", "plugin own: its mixer has the letter 'RM'; give it one character"),
        ("", "plugin own: its mixer has the letter ''; give it one character"),
        (" ", "plugin own: its mixer has the letter ' '; give it one character"),
    ],
)
def test_a_letter_that_cannot_be_is_named(letter: str, said: str, bring: Any) -> None:
    bring(Mixer(letter, lambda model, norm, number: Mean()))
    with pytest.raises(ConfigurationError, match=rf"^{re.escape(said)}.*\(docs/own_mixer\.md\)$"):
        letters()


def test_what_is_no_mixer_is_named(bring: Any) -> None:
    bring(Mean())
    with pytest.raises(ConfigurationError, match=r"^plugin own: its mixer is Mean; bring a tuple of Mixer.*own_mixer"):
        mixers()


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("a text", "the mixer of the letter 'R' is described by str; let `describe` return a Part"),
        (WithoutBuilder(), "has builder = 'megatron_ext.parts.nowhere:made', which is no function of a module"),
        (Part(), "has builder = '', which is no function of a module"),
        (Unfinished(), "is described by Unfinished, which lacks `parameters` and `products` and `held`; define what"),
    ],
)
def test_a_description_that_builds_nothing_is_named(part: Any, said: str, bring: Any) -> None:
    bring(_described(part))
    model = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    with pytest.raises(ConfigurationError, match=re.escape(said)) as caught:
        mixer_of(model, "R", 0)(model, Norm("RMSNorm", 1e-5), 0)
    assert str(caught.value).endswith("(docs/own_mixer.md)")


def test_a_function_of_other_arguments_is_named(bring: Any) -> None:
    bring(Mixer("R", cast(Any, lambda model: Mean())))
    model = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    with pytest.raises(
        ConfigurationError, match=r"letter 'R' has a `describe` that does not take \(model, norm, number"
    ):
        mixer_of(model, "R", 0)(model, Norm("RMSNorm", 1e-5), 0)
