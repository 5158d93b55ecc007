"""Every rule is asked on both sides of its bounds, and with each of the flags that it weighs left out by itself."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.resolve import resolve
from megatron_ext.rules.validate import RULES
from tests.support.near_flags import advice, around, lines, spoken_near, title

GOLDEN = Path(__file__).resolve().parents[2] / "golden/near_flags.json"
REGENERATE = "python tests/golden/regenerate.py"

NOT_ALONE = (
    # Two steps, of which each is advised with the other; and what a fact of the machine says, which stays here.
    "--no-position-embedding with --position-embedding-type none",
    "--load a: nothing is there",
    "--load None: nothing is there",
)
"""Beginnings of messages whose advice, one part of it followed by itself, changes nothing."""


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


def test_the_record_is_of_all_lines(golden: dict[str, Any]):
    assert [title(line, given) for line, _, given in lines()] == list(golden), REGENERATE


@pytest.mark.parametrize("part", range(2))
def test_next_to_every_wrong_command_line_the_rules_say_what_is_recorded(part: int, golden: dict[str, Any]):
    for number in range(part, len(lines()), 2):
        line, _, given = lines()[number]
        name, row = title(line, given), around(number)
        assert row == golden[name], f"{name!r}: {REGENERATE}, and read the diff"


def test_every_rule_speaks_in_the_record(golden: dict[str, Any]):
    """One that never does is not tested there. That of a missing value stands before all others, --load-hf reads a
    file, and a matrix without a rule is a user's own."""
    spoken = {name for row in golden.values() for names in [row["rules"], *row["near"].values()] for name in names}
    silent = {rule.__name__ for rule in RULES} - spoken
    assert silent == {"nothing_needed_is_missing", "model_is_the_one_to_load", "matrices_have_a_rule"}


@pytest.mark.parametrize("part", range(2))
def test_a_rule_takes_what_its_message_advises(part: int):
    """Beyond the examples, whose way out is written down: with every number in the list of a message."""
    followed, wrong = 0, []
    for number in range(part, len(lines()), 2):
        line, facts, _ = lines()[number]
        for what, moved, names, texts in spoken_near(number):
            for name, text in zip(names, texts, strict=True):
                for words, added, left_out in advice(text):
                    rule = next(rule for rule in RULES if rule.__name__ == name)
                    fixed = {key: value for key, value in {**moved, **added}.items() if key not in left_out}
                    followed += 1
                    if text in rule(resolve(fixed, facts), facts) and not text.startswith(NOT_ALONE):
                        wrong.append((line, what, text, words))
    assert followed > 200
    assert wrong == []
