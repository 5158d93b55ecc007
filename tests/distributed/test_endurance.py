"""A training that is killed at random ends with the bits of one that nobody touched (benchmarks/endurance.py)."""

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks import endurance as benchmark
from megatron_ext.verify import endurance
from megatron_ext.verify.endurance import CASES, Kill, Trial, differences, reference, run_trial, summary

STEPS = 24


def test_two_kills_change_no_bit_and_a_changed_bit_is_found(tmp_path: Path) -> None:
    case = CASES["DP2 distributed optimizer"]
    expected = reference(case, tmp_path / "reference", STEPS)
    names = ("DP2 distributed optimizer", "async save")
    trial = run_trial(names, tmp_path / "run", expected, random.Random(3), kills=2, steps=STEPS)
    assert not trial.differences
    assert len(trial.kills) >= 2, "it must be killed before its end"
    last = trial.kills[-1]
    assert last.resumed_at is not None
    assert last.resumed_at % endurance.SAVED_EVERY == 0

    name = next(name for name in expected.tensors if "weight" in name)
    rows = [*expected.rows[:-1], {**expected.rows[-1], "consumed_samples": 0}]
    found = differences((rows, {**expected.tensors, name: "0"}), expected)
    assert len(found) == 2
    assert f"{name} of the last checkpoint" in found


@pytest.mark.slow
def test_ten_kills_of_all_kinds_under_torchrun_and_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "endurance.json"
    words = ["endurance", "--resume", str(results), "--layouts", "DP2", "PP2", "--kills-each", "5", "--seconds", "3000"]
    for more in (["--kills", "5", "--torchrun-every", "0"], ["--kills", "5", "--torchrun-every", "1"]):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        assert benchmark.main() == 0
    record = json.loads(results.read_text())
    assert (
        sum(part["kills"] for part in record["parts"]) == sum(len(trial["kills"]) for trial in record["trials"]) >= 10
    )
    assert {trial["launcher"] for trial in record["trials"]} == {"ForkedRanks", "Torchrun"}
    assert f"| kills | {summary(record['trials'])['kills']} |" in results.with_suffix(".md").read_text()


def test_the_summary_counts_what_the_parts_hold() -> None:
    kills = [
        Kill("a step", [0], 9, 8, 2.0),
        Kill("a save", [1], 12, None, None),
        Kill("recovery", [1], 12, 8, 4.0, late=1),
    ]
    trials = [Trial("DP2", "save", "ForkedRanks", 10.0, 2.0, kills), Trial("PP2", "save", "Torchrun", 10.0, 2.0)]
    trials[1].differences.append("row 1")
    found = summary([trial.as_row() for trial in trials])
    assert (found["trainings"], found["kills"], found["equal_to_the_bit"]) == (2, 3, 1)
    assert found["kills_by_kind"]["recovery"] == 1
    assert found["steps_lost"] == {"mean": 2.5, "most": 4}
    assert found["seconds_to_resume"] == {"median": 3.0, "95th percentile": 2.0, "longest": 4.0}
    assert found["goodput"] == 0.2
    assert found["ranks_that_had_to_be_killed_after_10_s"] == 1
