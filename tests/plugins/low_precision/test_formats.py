"""Recipes by the flags, and the layers that they are for."""

import pytest

from megatron_ext.plugins.low_precision.formats import chosen_layers, recipe_of
from tests.support.small_models import small_config


@pytest.mark.parametrize(
    ("are_others", "start", "end", "chosen"),
    [(False, 2, 1, [0, 1, 2, 3]), (True, 2, 0, [2, 3]), (True, 0, 1, [0, 1, 2]), (True, 1, 1, [1, 2])],
)
def test_layers_that_multiply_in_few_bits(are_others: bool, start: int, end: int, chosen: list[int]) -> None:
    training = {"first_last_layers_bf16": are_others, "num_layers_at_start_in_bf16": start}
    training |= {"num_layers_at_end_in_bf16": end}
    for asked in ({"fp8_format": "hybrid"}, {"fp4_format": "e2m1"}):
        assert list(chosen_layers(small_config(training={**training, **asked}))) == chosen
    assert list(chosen_layers(small_config(training=training))) == []


def test_sides_and_bits_of_each_recipe() -> None:
    found = {}
    for kind, recipes in (("fp8", ("tensorwise", "rowwise", "blockwise", "mxfp8")), ("fp4", ("nvfp4", "mxfp4"))):
        for name in recipes:
            flags = {f"{kind}_format": "hybrid" if kind == "fp8" else "e2m1", f"{kind}_recipe": name}
            recipe = recipe_of(small_config(training=flags))
            elements = [(pair.left.element.name, pair.right.element.name) for pair in recipe]
            found[name] = recipe.multiple, len(set(elements)), recipe.is_random
    assert found == {
        "tensorwise": (16, 2, False),
        "rowwise": (16, 2, False),
        "blockwise": (128, 2, False),
        "mxfp8": (32, 2, False),
        "nvfp4": (32, 1, True),
        "mxfp4": (32, 1, False),
    }
