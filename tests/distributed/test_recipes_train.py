"""The tiny copy of a recipe of each family trains its 5 steps on CPU ranks, and the loss goes down."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools.recipes import LOSSES, keep, measured, recipes

FAMILIES = ("gpt2-124m", "llama3.1-8b", "qwen2.5-7b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "olmo2-7b")


def check(losses: Mapping[str, list[float]]) -> None:
    for name, steps in losses.items():
        assert len(steps) == 5, name
        assert steps[0] == pytest.approx(5.5, abs=0.2), f"{name}: ln(250) at first"
        assert steps[-1] < steps[0] - 0.02, f"{name}: {steps}"


@pytest.mark.slow  # test_huggingface.py builds each family
def test_a_tiny_copy_of_every_family_trains(tmp_path: Path) -> None:
    """Where `python tools/recipes.py measure` has kept losses for docs/recipes.md, they are these."""
    losses = measured(FAMILIES, 2)
    check(losses)
    kept = json.loads(LOSSES.read_text()) if LOSSES.exists() else {}
    for name in losses.keys() & kept.keys():
        assert losses[name] == pytest.approx(kept[name], abs=5e-4), name
    keep({"qwen3-8b": [1.0]}, tmp_path / "losses.json")
    keep({"gpt2-124m": [2.0], "no recipe": [3.0]}, tmp_path / "losses.json")
    assert json.loads((tmp_path / "losses.json").read_text()) == {"gpt2-124m": [2.0], "qwen3-8b": [1.0]}


@pytest.mark.slow
def test_a_tiny_copy_of_every_recipe_trains_in_its_own_layout() -> None:
    check(measured([recipe.name for recipe in recipes() if recipe.devices], 8))
