"""The phase `ranks` of benchmarks/gpu_session.py on CPU ranks: all that it does on GPUs, but for NCCL."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import gpu_ranks, gpu_session
from megatron_ext.plugins.prove.cases import CASES

# Of the second tier: tests/unit/benchmarks lists the cases.
pytestmark = pytest.mark.full

ONLY = "one rank, untied|ranks: TP2 SP, untied|ranks: PP2, untied|PP4"


def test_layouts_are_held_against_one_rank(tmp_path: Path) -> None:
    given = ["--device", "cpu", "--phase", "ranks", "--only", ONLY, "--devices", "2", "--output", str(tmp_path)]
    assert gpu_session.main([*given, "--budget-seconds", "1200", "--limit", "290"]) == 0
    (record,) = tmp_path.glob("*.jsonl")
    rows = {row["case"]: row for row in map(json.loads, record.read_text().splitlines())}
    assert {name: row["status"] for name, row in rows.items()} == {
        "one rank, untied": "passed",
        "TP2 SP, untied, gloo": "passed",
        "PP2, untied, gloo": "passed",
        "PP4 VPP2, untied, gloo": "not run",
    }
    for name in ("TP2 SP, untied, gloo", "PP2, untied, gloo"):
        distances = rows[name]["figures"]
        assert 0.0 < max(distances.values()) <= 1e-5, f"two runs in two layouts: {distances}"


def test_a_layout_that_trains_otherwise_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "DP2 distributed optimizer, overlap, untied"
    other = replace(CASES[name], flags=(*CASES[name].flags, "--lr", "2e-3"))
    monkeypatch.setitem(gpu_ranks.CASES, name, other)
    found = gpu_ranks.several_ranks("cpu", "gloo", name)
    assert found["first loss"] <= 1e-6
    assert "loss is" in found["wrong"]
