"""--profile on real steps."""

import json
from pathlib import Path
from typing import Any

import torch

from megatron_ext.config.schema import CheckpointConfig, Config, LoggingConfig
from megatron_ext.telemetry.profiler import StepProfiler


def run(config: Config, steps: int) -> Path:
    with StepProfiler.from_config(config, rank=3) as profiler:
        for iteration in range(1, steps + 1):
            profiler.before_step(iteration)
            with torch.profiler.record_function(f"step {iteration}"):
                torch.ones(2).sum()
    return profiler.path


def traced_steps(path: Path) -> list[str]:
    events = json.loads(path.read_text())["traceEvents"]
    return sorted(event["name"] for event in events if event["name"].startswith("step "))


def config_with(folder: Path, **logging: Any) -> Config:
    return Config(checkpoint=CheckpointConfig(save=str(folder)), logging=LoggingConfig(**logging))


def test_the_steps_of_the_range_are_in_the_trace(tmp_path: Path):
    path = run(config_with(tmp_path, profile=True, profile_step_start=2, profile_step_end=4), steps=5)
    assert path == tmp_path / "profile" / "rank3.json"
    assert traced_steps(path) == ["step 2", "step 3"]


def test_a_run_that_ends_inside_the_range_still_writes_its_trace(tmp_path: Path):
    path = run(config_with(tmp_path, profile=True, profile_step_start=2, profile_step_end=9), steps=3)
    assert traced_steps(path) == ["step 2", "step 3"]


def test_without_the_flag_nothing_is_written(tmp_path: Path):
    run(config_with(tmp_path), steps=12)
    assert list(tmp_path.iterdir()) == []
