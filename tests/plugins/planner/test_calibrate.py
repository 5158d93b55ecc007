"""The machine that the planner computes with: what the table, the flags and a measured run say of it."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.resolve import Facts
from megatron_ext.cost.hardware import (
    ASSUMED_RANGE,
    CALIBRATED_RANGE,
    CPU,
    RANGE,
    TABLE,
    Constants,
    Machine,
    constants_of,
    hardware,
)
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.pages import loss_curve
from megatron_ext.plugins.pages.loss_curve import saved_values
from megatron_ext.plugins.planner import calibrate
from megatron_ext.plugins.planner.calibrate import believed, corrected, read_metrics
from megatron_ext.plugins.planner.estimate import step_time
from tests.support import planner_numbers
from tests.support.planner_numbers import CASES, config_of, machine_of
from tests.support.small_models import small_config


def test_a_process_has_its_share_of_the_cores_of_its_node() -> None:
    machine = Machine(hardware("cpu"), gpus_per_node=4, constants=replace(CPU, cores=2))
    assert [machine.processes_share(world) for world in (1, 2, 3, 4, 16)] == [1.0, 1.0, 2 / 3, 0.5, 0.5]
    assert Machine(hardware("cpu")).processes_share(64) == 1.0


def test_what_was_given_wins_over_the_table() -> None:
    plain = Machine(hardware("h100"))
    given = Machine(hardware("h100"), efficiency=0.3675, link_efficiency=0.5)
    assert (given.matmul_share, given.intra_share, given.inter_share) == (0.3675, 0.5, 0.5)
    assert (plain.matmul_share, plain.intra_share, plain.inter_share) == (0.735, 0.8, 0.95)
    assert given.attention_share == pytest.approx(plain.attention_share / 2)
    assert given.fsdp_attention_share == pytest.approx(plain.fsdp_attention_share / 2) == pytest.approx(0.093)
    assert (plain.range, Machine(hardware("b200")).range) == (RANGE, ASSUMED_RANGE)
    assert replace(plain, correction=1.0).range == CALIBRATED_RANGE == Machine(hardware("b200"), correction=2.0).range
    assert (constants_of(hardware("cpu")), constants_of(hardware("l40s"))) == (CPU, Constants())


def test_a_bandwidth_of_another_row_of_the_chip_means_that_row() -> None:
    assert hardware("a100", memory_bandwidth_gb_s=1555.0).memory_gb == TABLE["a100-40"].memory_gb
    assert hardware("a100", memory_bandwidth_gb_s=1555.0 * 1.029).name == "a100-40"
    assert hardware("a100", memory_bandwidth_gb_s=1555.0 * 1.04).name == "a100"
    assert hardware("a100", memory_bandwidth_gb_s=1555.0 * 1.04).memory_bandwidth_gb_s == 1555.0 * 1.04
    assert hardware("h100", memory_bandwidth_gb_s=4800.0, memory_gb=100.0).memory_gb == 100.0
    assert hardware("h100", memory_gb=0.0).memory_gb == 0.0


def test_the_peak_is_that_of_the_precision() -> None:
    training = small_config().training
    row = TABLE["a100"]
    assert row.peak_flops(training) == 19.5e12
    assert row.peak_flops(replace(training, tf32=True)) == 156e12
    for kind in ("bf16", "fp16"):
        assert row.peak_flops(replace(training, **{kind: True})) == 312e12


def metrics(folder: Path, *rows: Any) -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def row(elapsed_ms: Any, batch: int = 8, **more: Any) -> dict[str, Any]:
    return {"iteration": 1, "elapsed_ms": elapsed_ms, "global_batch_size": batch, "world_size": 4, **more}


def test_the_speed_is_the_median_of_what_comes_behind_the_warm_up(tmp_path: Path) -> None:
    slow = [row(9000)] * 2
    found = read_metrics(metrics(tmp_path, *slow, row(100), row(110), row(120), row(5000), *[row(130)] * 4))
    assert (found.seconds, found.global_batch_size, found.world_size) == (0.13, 8, 4)
    found = read_metrics(metrics(tmp_path, *[row(9000)] * 10, *[row(200)] * 7, *[row(300)] * 83))
    assert found.seconds == 0.3
    assert read_metrics(metrics(tmp_path, *[row(9000)] * 10, *[row(200)] * 45, *[row(300)] * 45)).seconds == 0.25
    assert read_metrics(metrics(tmp_path, row(50))).seconds == 0.05


def test_only_steps_of_the_last_batch_size_count(tmp_path: Path) -> None:
    rows = [row(10, 2)] * 5 + [row(40, 8), row(50, 8), row(45, 8)]
    assert read_metrics(metrics(tmp_path, *rows)).seconds == 0.045


def test_what_is_no_step_is_left_out(tmp_path: Path) -> None:
    others = ("", "{", "[1]", "3", row(0), row(-1), row("1"), row(None), {"iteration": 1, "validation_loss": 1.0})
    assert read_metrics(metrics(tmp_path, row(20), *others, row(30), row(40))).seconds == 0.03
    with pytest.raises(ConfigurationError, match="has no row with elapsed_ms"):
        read_metrics(metrics(tmp_path, *others))
    with pytest.raises(ConfigurationError, match="is no file"):
        read_metrics(tmp_path)


def test_values_are_those_of_the_newest_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_curve, "read_saved", lambda path: {"from": path.parent.name})
    assert saved_values(tmp_path / "metrics.jsonl") is None
    for number, when in (("1", 30), ("2", 50), ("3", 40)):
        (tmp_path / f"iter_{number}").mkdir()
        (tmp_path / f"iter_{number}" / "config.yaml").touch()
        os.utime(tmp_path / f"iter_{number}" / "config.yaml", (when, when))
    assert saved_values(tmp_path / "metrics.jsonl") == {"from": "iter_2"}


def test_a_run_is_believed_as_far_as_programs_differ() -> None:
    assert believed(1.0) == 1.0
    # r t^2 / (t^2 + s^2), where r is within t^2 + s^2; else t^2 = r^2 - s^2.
    assert believed(math.exp(0.05), 0.03, 0.05) == pytest.approx(math.exp(0.05 * 0.0009 / (0.0009 + 0.0025)))
    assert believed(2.0, 0.03, 0.05) == pytest.approx(math.exp(math.log(2) * (1 - 0.0025 / math.log(2) ** 2)))
    assert believed(0.5, 0.03, 0.05) == pytest.approx(1 / believed(2.0, 0.03, 0.05))


def test_the_correction_is_that_of_the_measured_layout_and_batch() -> None:
    case = CASES["ZeRO-1, gathers alone late"]
    values = {**planner_numbers.parse(case.flags.split()).values, "lr": 1e-3, "train_iters": 9, "mock_data": True}
    machine, facts = machine_of(case), Facts(cuda_available=True)
    estimate = step_time(config_of(case), Shapes(config_of(case)), machine).total
    for measured, known in (
        (calibrate.Measured(2 * estimate, 64, 16), values),
        (calibrate.Measured(2 * estimate, None, 2), {**values, "world_size": 16}),
        (calibrate.Measured(2 * estimate, 64, 16), {**values, "global_batch_size": 16}),
    ):
        found = corrected(replace(machine, correction=7.0), known, facts, measured)
        assert found.measured_ratio is not None
        assert found.measured_ratio == pytest.approx(2.0, rel=1e-9)
        assert found.correction == believed(found.measured_ratio)
    assumed = Machine(hardware("b200"))
    other = corrected(assumed, values, facts, calibrate.Measured(1.0, 64, 16))
    assert other.correction == believed(other.measured_ratio or 0.0, calibrate.ASSUMED_PROGRAMS_DIFFER)
    with pytest.raises(ConfigurationError) as raised:
        corrected(machine, {**values, "tensor_model_parallel_size": 3}, facts, calibrate.Measured(1.0, 64, 16))
    assert all(
        problem.startswith("the run of --calibrate: --") or "world size" in problem for problem in raised.value.problems
    )
