"""A few hundred changed inputs for everything that reads what others wrote; `--all` tries thousands.

`python -m tests.fuzz.fuzzer --inputs 10000 --seed N` tries others.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.errors import DataError
from tests.fuzz import fuzzer
from tests.fuzz.targets import TARGETS


# Slow: twenty times as many inputs.
@pytest.mark.parametrize(("inputs", "seed"), [(25, 7), pytest.param(500, 8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", TARGETS)
def test_changed_inputs_are_refused_or_read_right(target: str, inputs: int, seed: int) -> None:
    outcomes, findings = fuzzer.fuzz(inputs, seed, targets=[target])
    assert findings == []
    assert sum(outcomes.values()) == inputs


def _trace(chance: random.Random) -> None:
    raise KeyError("what")


def _wait(chance: random.Random) -> None:
    while True:
        time.time()


def _wrong(chance: random.Random) -> None:
    raise AssertionError("taken for another")


def _endless(chance: random.Random) -> None:
    raise DataError("x" * 100_000)


@pytest.mark.parametrize(
    ("read", "what"),
    [
        (_trace, "KeyError: \"'what'\" at the target itself"),
        (_wait, "TooLongError: 'more than 0.2 seconds'"),
        (_wrong, "AssertionError: 'taken for another'"),
        (_endless, "wrong message: 100000 characters"),
    ],
)
def test_a_planted_fault_is_found(
    read: Callable[[random.Random], None], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzzer, "SECONDS", 0.2)
    monkeypatch.setitem(TARGETS, "planted", lambda folder: read)
    _, [finding] = fuzzer.fuzz(1, seed=1, targets=["planted"])
    assert finding.what.startswith(what)
    assert finding.seed == "1:planted:0"


def test_the_same_seed_gives_the_same_inputs(tmp_path: Path) -> None:
    assert fuzzer.fuzz(60, seed=3, targets=["json", "yaml"]) == fuzzer.fuzz(60, seed=3, targets=["json", "yaml"])
