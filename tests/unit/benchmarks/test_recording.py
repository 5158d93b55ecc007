"""What benchmarks keep: machine, versions and date with every record, and what they compute of their figures."""

import json
import math
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fp8_loss, operations, recording


def test_a_record_names_machine_versions_and_date(tmp_path: Path) -> None:
    began = datetime.now(UTC).date().isoformat()
    record = recording.heading()
    assert began <= record["date"] <= datetime.now(UTC).date().isoformat()
    said = recording.sentence(record)
    for package in ("torch", "megatron-core"):
        assert f"{package} {version(package)}," in said
    assert f"{record['machine']['cpu']}, {record['machine']['cores']} cores" in said
    recording.keep(tmp_path, "measured", record, said)
    assert json.loads((tmp_path / f"measured-{record['date']}.json").read_text()) == record


def test_a_record_of_another_day_is_still_said() -> None:
    """Records that are older than the versions in them, and those of a machine with GPUs."""
    machine = {"cpu": "EPYC", "cores": 2, "load_average": 0.5, "python": "3.12.1"}
    old = {"machine": machine, "commit": "abc"}
    assert recording.sentence(old) == "EPYC, 2 cores, load average 0.5 before the start, Python 3.12.1, commit abc."
    machine["gpus"] = ["H200", "H200"]
    assert "2 cores, 2 x H200, load" in recording.sentence(old)


def _losses(*losses: float) -> dict[str, dict[str, float]]:
    return {
        str(seed): {"training_loss": loss, "validation_loss": 2 * loss, "largest_grad_norm": loss}
        for seed, loss in enumerate(losses)
    }


def test_gaps_are_of_the_same_seed_and_have_a_standard_error() -> None:
    runs = {"bf16": _losses(2.0, 4.0), "hybrid": _losses(2.02, 4.12, 9.0)}
    gaps = fp8_loss.gaps(runs, "hybrid", "training_loss")
    assert gaps == pytest.approx([0.01, 0.03])
    assert fp8_loss.mean_and_error(gaps) == pytest.approx((0.02, 0.01))
    mean, error = fp8_loss.mean_and_error([0.5])
    assert mean == 0.5
    assert math.isnan(error)
    record: dict[str, Any] = {
        **recording.heading(),
        "steps": 500,
        "text": "t.txt",
        "sequences": 4,
        "lr": 2e-3,
        "runs": runs,
    }
    assert "| hybrid | 3 | 5.0467 | +2.00% ± 1.00% |" in fp8_loss.page(record)


def test_the_least_memory_of_a_head_stands_next_to_its_peak() -> None:
    row = {"error": 1e-7, "peak_bytes": 10**9, "cpu_seconds": 2.0, "ratio": 1.0}
    heads = {"8192 x 256": {"plain": row, "fused": {**row, "peak_bytes": 10**8, "ratio": 0.5, "least_bytes": 99e6}}}
    record = {**recording.heading(), "results": {}, "heads": heads, "rounds": 1, "tokens": 1, "small": 1}
    text = operations.report(record)
    assert "| 8192 x 256 | plain | 1.0e-07 | 1000 |  | 1.000 | 2.000 | 1.00 |" in text
    assert "| 8192 x 256 | fused | 1.0e-07 | 100 | 99 | 0.100 | 2.000 | 0.50 |" in text
