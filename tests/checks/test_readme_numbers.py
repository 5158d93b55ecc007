"""The numbers of models and recipes that README.md and README.zh.md state are those that there are."""

import re
from pathlib import Path

import pytest

from megatron_ext.plugins.families.hf_config import model_types

ROOT = Path(__file__).resolve().parents[2]
RECIPES = len(list((ROOT / "examples/recipes").glob("*.yaml")))


@pytest.mark.parametrize(
    ("page", "words", "number"),
    [
        ("README.md", r"(\d+) types of Hugging Face models", len(model_types())),
        ("README.zh.md", r"(\d+) 种 Hugging Face", len(model_types())),
        ("README.md", r"one of (\d+) recipes", RECIPES),
        ("README.zh.md", r"(\d+) 个配方", RECIPES),
        ("docs/tour.md", r"recipes/: (\d+) models and layouts", RECIPES),
    ],
)
def test_a_stated_number_is_that_of_the_registry(page: str, words: str, number: int) -> None:
    assert re.findall(words, (ROOT / page).read_text()) == [str(number)], f"{page} has to say {number}"
