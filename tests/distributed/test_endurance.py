"""A training that is killed at random ends with the bits of one that nobody touched (benchmarks/endurance.py)."""

import json
import random
import sys
from pathlib import Path

import pytest

from benchmarks import endurance as benchmark
from benchmarks import killed_training
from benchmarks.killed_training import (
    CASES,
    VARIANTS,
    Kill,
    Trial,
    combinations,
    differences,
    largest_difference,
    reference,
    run_trial,
    summary,
)

# Of the second tier: tests/distributed/test_resume.py resumes.
pytestmark = pytest.mark.full

STEPS = 24


def test_two_kills_change_no_bit_and_a_changed_bit_is_found(tmp_path: Path) -> None:
    case = CASES["DP2 distributed optimizer"]
    expected = reference(case, tmp_path / "reference", STEPS)
    names = ("DP2 distributed optimizer", "async save")
    trial = run_trial(names, tmp_path / "run", expected, random.Random(3), kills=2, steps=STEPS, launcher="forkserver")
    assert not trial.differences
    assert len(trial.kills) >= 2, "it must be killed before its end"
    last = trial.kills[-1]
    assert last.resumed_at is not None
    assert last.resumed_at % killed_training.SAVED_EVERY == 0

    name = next(name for name in expected.tensors if "weight" in name)
    rows = [*expected.rows[:-1], {**expected.rows[-1], "consumed_samples": 0}]
    found = differences((rows, {**expected.tensors, name: "0"}), expected)
    assert len(found) == 2
    assert f"{name} of the last checkpoint" in found


# Slow: the plain run has two kills; test_snapshots.py and test_elastic_agents.py have each way to restart.
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["snapshots", "snapshots, lost machines", "elastic"])
def test_three_kills_with_every_other_way_to_restart(variant: str, tmp_path: Path) -> None:
    case, names = CASES["DP2"], ("DP2", variant)
    expected = reference(case, tmp_path / "reference", STEPS, elastic=variant == "elastic")
    trial = run_trial(names, tmp_path / "run", expected, random.Random(1), kills=3, steps=STEPS, launcher="forkserver")
    assert not trial.differences
    assert len(trial.kills) >= 3
    log = (tmp_path / "run" / "log").read_text()
    assert ("of the snapshots in" in log) == (variant != "elastic"), log[-3000:]
    if variant == "elastic":
        assert {kill.of for kill in trial.kills} == {1, 2}


def test_metrics_of_another_number_of_ranks_are_compared_within_the_tolerance() -> None:
    row = {"iteration": 1, "lm_loss": 4.0, "grad_norm": None}
    for other, apart in (
        (row, True),
        ({**row, "lm_loss": 4.0 * (1 + 9e-7)}, True),
        ({**row, "lm_loss": 4.0 * (1 - 2e-6)}, False),
        ({**row, "lm_loss": float("nan")}, False),
        ({**row, "iteration": 2}, False),
        ({**row, "world_size": 2}, True),
        ({**row, "grad_norm": 1.0}, False),
        ({"iteration": 1, "lm_loss": 4.0}, True),
        ({"iteration": 1, "grad_norm": None}, False),
    ):
        assert (largest_difference([row, other], [row, row])[1] == []) == apart, other
    assert largest_difference([row], [row, row])[1] == ["2 rows became 1"]


def test_the_kills_go_where_the_fewest_were() -> None:
    names = combinations("forkserver")
    trials = [Trial(*each, "forkserver", kills=[Kill("a step", [0], 9)]).as_row() for each in names[1:]]
    trials.append(Trial(*names[0], "torchrun", kills=[Kill("a step", [0], 9)]).as_row())
    assert benchmark.least_killed(trials, "forkserver", list(CASES), list(VARIANTS)) == names[0]
    assert not any(VARIANTS[variant].elastic for _, variant in combinations("torchrun"))


# Slow: ten kills; test_kill_and_resume.py kills ranks of torchrun.
@pytest.mark.slow
def test_ten_kills_of_all_kinds_under_torchrun_and_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "endurance.json"
    words = ["endurance", "--resume", str(results), "--layouts", "DP2", "PP2", "--kills-each", "5", "--seconds", "3000"]
    for launcher in ("forkserver", "torchrun"):
        monkeypatch.setattr(sys, "argv", [*words, "--kills", "5", "--launcher", launcher])
        assert benchmark.main() == 0
    record = json.loads(results.read_text())
    assert (
        sum(part["kills"] for part in record["parts"]) == sum(len(trial["kills"]) for trial in record["trials"]) >= 10
    )
    assert {trial["launcher"] for trial in record["trials"]} == {"forkserver", "torchrun"}
    assert f"| kills | {summary(record['trials'])['kills']} |" in results.with_suffix(".md").read_text()


def test_the_summary_counts_what_the_parts_hold() -> None:
    kills = [
        Kill("a step", [0], 9, 8, 2.0),
        Kill("a save", [1], 12, None, None),
        Kill("recovery", [1], 12, 8, 4.0, late=1),
    ]
    trials = [Trial("DP2", "save", "forkserver", 10.0, 2.0, kills), Trial("PP2", "save", "torchrun", 10.0, 2.0)]
    trials[1].differences.append("row 1")
    found = summary([trial.as_row() for trial in trials])
    assert (found["trainings"], found["kills"], found["equal_to_the_bit"]) == (2, 3, 1)
    assert found["kills_by_kind"]["recovery"] == 1
    assert found["steps_lost"] == {"mean": 2.5, "most": 4}
    assert found["seconds_to_resume"] == {"median": 3.0, "95th percentile": 2.0, "longest": 4.0}
    assert found["goodput"] == 0.2
    assert found["ranks_that_had_to_be_killed_after_10_s"] == 1
