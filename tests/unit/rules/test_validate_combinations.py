"""Every rule about how ranks share the work has a wrong command line in docs/errors.md that breaks it."""

import importlib
import pkgutil
import shlex
from typing import Any

import pytest

from megatron_ext import rules
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import resolve
from megatron_ext.train.configure import gather_facts
from tests.support.errors_page import combinations, errors_page
from tests.support.wrong_flags import BASE, EXAMPLES

# Rules about one flag by itself, or about the machine.
NO_COMBINATION = {"matrices_have_a_rule", "ranks_are_those_of_the_launch", "timeout_is_a_time"}
ABOUT_OTHER_THINGS = {"model_rules", "training_rules", "curve_rules", "run_rules", "suggest", "validate"}


def layout_rules() -> list[Any]:
    found = []
    for module in pkgutil.iter_modules(rules.__path__):
        if module.name not in ABOUT_OTHER_THINGS:
            found += importlib.import_module(f"{rules.__name__}.{module.name}").RULES
    return [rule for rule in found if rule.__name__ not in NO_COMBINATION]


@pytest.fixture(scope="module")
def broken() -> set[str]:
    """Names of the rules that some example breaks."""
    names: set[str] = set()
    for example in EXAMPLES.values():
        typed = parse(shlex.split(f"{BASE} {example.flags}"))
        facts = gather_facts(typed)
        config = resolve(typed.values, facts)
        names |= {rule.__name__ for rule in layout_rules() if list(rule(config, facts))}
    return names


@pytest.mark.parametrize("rule", layout_rules(), ids=lambda rule: rule.__name__)
def test_a_wrong_command_line_shows_the_rule(rule: Any, broken: set[str]) -> None:
    assert rule.__name__ in broken, f"add a command line that breaks {rule.__name__} to tests/support/wrong_flags.py"


def test_the_page_lists_the_combinations() -> None:
    page = errors_page()
    assert len(combinations()) >= 12
    for title in combinations():
        assert f"| [{title}](#" in page
