"""The tiny copy of a recipe of each family trains its 5 steps on CPU ranks, and the loss goes down.

`python tools/recipes.py measure` has kept the losses of all copies for docs/recipes.md; here they are the same.
"""

from collections.abc import Mapping

import pytest

from tools.recipes import kept_losses, measured, recipes, reduce

FAMILIES = ("gpt2-124m", "llama3.1-8b", "qwen2.5-7b", "qwen3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "olmo2-7b")


def check(losses: Mapping[str, list[float]], most_ranks: int) -> None:
    kept = kept_losses()
    found = {recipe.name: recipe for recipe in recipes()}
    for name, steps in losses.items():
        ranks = reduce(found[name].values, most_ranks)[1]
        assert steps == pytest.approx(kept[name][str(ranks)], abs=5e-4), name


@pytest.mark.slow  # test_huggingface.py builds each family
def test_a_tiny_copy_of_every_family_trains() -> None:
    check(measured(FAMILIES, 2), 2)


# Slow: 40 recipes on up to 8 ranks; test_recipes.py has every recipe's dry run.
@pytest.mark.slow
def test_a_tiny_copy_of_every_recipe_trains_in_its_own_layout() -> None:
    check(measured([recipe.name for recipe in recipes() if recipe.devices], 8), 8)
