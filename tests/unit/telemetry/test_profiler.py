"""--profile and --record-memory-history on real steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.config.schema import CheckpointConfig, Config, LoggingConfig, ProfilingConfig
from megatron_ext.device.cpu import CpuDevice
from megatron_ext.errors import StorageError
from megatron_ext.telemetry.profiler import NsightCapture, StepProfiler, TorchTrace, open_range
from megatron_ext.train.callbacks import profiling


class Gpu(CpuDevice):
    """Stands in for hardware that is not there: it notes what it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def start_capture(self, *, shapes: bool, ranges: bool) -> None:
        self.asked.append({"shapes": shapes, "ranges": ranges})

    def stop_capture(self) -> None:
        self.asked.append("stop")


def run(config: Config, steps: int, device: CpuDevice | None = None, rank: int = 3) -> None:
    profiler = StepProfiler.from_config(config, rank, device or CpuDevice())
    for iteration in range(1, steps + 1):
        profiler.before_step(iteration)
        with torch.profiler.record_function(f"step {iteration}"):
            torch.ones(2, 5).sum()
        if isinstance(device, Gpu):
            device.asked.append(iteration)
    profiler.finish()


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def traced_steps(path: Path) -> list[str]:
    return sorted(event["name"] for event in events(path) if event["name"].startswith("step "))


def config_with(folder: Path, **profiling: Any) -> Config:
    return Config(checkpoint=CheckpointConfig(save=str(folder)), profiling=ProfilingConfig(**profiling))


TORCH: dict[str, Any] = {"profile": True, "use_pytorch_profiler": True, "profile_step_start": 2}


def test_the_steps_of_the_range_are_in_the_trace(tmp_path: Path):
    run(config_with(tmp_path, **TORCH, profile_step_end=4), steps=5)
    [path] = (tmp_path / "profile").iterdir()
    assert path == tmp_path / "profile" / "rank3.json"
    assert traced_steps(path) == ["step 2", "step 3"]
    assert "Input Dims" not in path.read_text()


def test_a_run_that_ends_inside_the_range_still_writes_its_trace(tmp_path: Path):
    run(config_with(tmp_path, **TORCH, profile_step_end=9), steps=3)
    assert traced_steps(tmp_path / "profile" / "rank3.json") == ["step 2", "step 3"]


@pytest.mark.parametrize("wanted", [(), ("shapes",), ("callstack",), ("chakra",)])
def test_the_trace_holds_what_is_asked_for_and_nothing_else(wanted: tuple[str, ...], tmp_path: Path):
    """record_shapes and nvtx_ranges are for Nsight."""
    flags = {f"pytorch_profiler_collect_{name}": True for name in wanted}
    config = config_with(tmp_path, **TORCH, profile_step_end=3, record_shapes=True, nvtx_ranges=True, **flags)
    run(config, steps=3)
    trace, chakra = events(tmp_path / "profile/rank3.json"), tmp_path / "profile/rank3.chakra.json"
    shapes = [event["args"].get("Input Dims") for event in trace if event["name"] == "aten::sum"]
    assert {[2, 5] in (each or []) for each in shapes} == {"shapes" in wanted}
    assert any("test_profiler.py" in event["name"] for event in trace) == ("callstack" in wanted)
    assert chakra.exists() == ("chakra" in wanted)
    if chakra.exists():
        assert "aten::sum" in {node["name"] for node in json.loads(chakra.read_text())["nodes"]}


@pytest.mark.parametrize(
    ("save", "events_folder", "folder"),
    [("run", "events", "run"), ("run", None, "run"), (None, "events", "events"), (None, None, ".")],
)
def test_where_a_trace_lies(save: str | None, events_folder: str | None, folder: str) -> None:
    config = Config(
        checkpoint=CheckpointConfig(save=save),
        logging=LoggingConfig(tensorboard_dir=events_folder),
        profiling=ProfilingConfig(**TORCH),
    )
    tracer = StepProfiler.from_config(config, 12, CpuDevice()).tracer
    assert isinstance(tracer, TorchTrace)
    assert tracer.path == Path(folder) / "profile" / "rank12.json"


@pytest.mark.parametrize(("ranks", "traced"), [((), [0, 1, 2, 3]), (None, [0, 1, 2, 3]), ((0,), [0]), ((1, 3), [1, 3])])
def test_the_ranks_that_are_named_are_traced(ranks: tuple[int, ...] | None, traced: list[int]) -> None:
    config = config_with(Path("run"), **TORCH, profile_ranks=ranks)
    made = [StepProfiler.from_config(config, rank, CpuDevice()).tracer for rank in range(4)]
    assert [rank for rank, tracer in enumerate(made) if tracer is not None] == traced


def test_named_ranges_are_of_the_profiler_that_runs() -> None:
    assert open_range(Config()) is None
    assert open_range(Config(profiling=ProfilingConfig(use_pytorch_profiler=True))) is None
    assert open_range(Config(profiling=ProfilingConfig(**TORCH))) is torch.profiler.record_function
    assert open_range(Config(profiling=ProfilingConfig(profile=True))) is torch.cuda.nvtx.range


def test_a_trace_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    with pytest.raises(StorageError, match=r"cannot write the trace .*rank0\.json: .*Leave out --profile\."):
        TorchTrace(tmp_path / "profile" / "rank0.json").start()


@pytest.mark.parametrize("profiling", [{}, {**TORCH, "profile_ranks": (0, 2)}])
def test_without_the_flag_or_on_another_rank_nothing_is_written(tmp_path: Path, profiling: dict[str, Any]):
    run(config_with(tmp_path, **profiling), steps=12)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("flag", "shapes", "ranges"), [("nvtx_ranges", False, True), ("record_shapes", True, False)])
def test_nsight_is_told_of_the_range(flag: str, shapes: bool, ranges: bool, tmp_path: Path):
    config = config_with(tmp_path, profile=True, profile_step_start=2, profile_step_end=4, **{flag: True})
    device = Gpu()
    run(config, 5, device)
    assert device.asked == [1, {"shapes": shapes, "ranges": ranges}, 2, 3, "stop", 4, 5]
    assert list(tmp_path.iterdir()) == []


def test_memory_is_recorded_on_the_ranks_that_are_named(tmp_path: Path):
    config = config_with(tmp_path, record_memory_history=True, profile_ranks=(1,))
    assert [profiling.is_recorded(config, rank) for rank in range(3)] == [False, True, False]
    assert profiling.MemoryHistory("logs/memory.pickle", 12, 10).path == Path("logs/memory_12.pickle")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_capture_and_memory(tmp_path: Path):
    from megatron_ext.device.cuda import CudaDevice

    device = CudaDevice(0)
    device.record_memory_history()
    capture = NsightCapture(device, shapes=True, ranges=True)
    capture.start()
    torch.ones(1000, device="cuda").sum()
    capture.stop()
    device.write_memory_history(str(tmp_path / "memory.pickle"))
    assert (tmp_path / "memory.pickle").stat().st_size > 100
