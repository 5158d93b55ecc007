"""Runs --profile: some steps under a profiler.

--record-memory-history records every allocation of GPU memory, for pytorch.org/memory_viz.

Recording begins before the model is built (`begin`), so that each block's origin is known.

Runs --record-schedule: in some steps, when each rank runs which pass.
"""

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.device.device_protocol import Device
from megatron_ext.durable import only_files
from megatron_ext.errors import StorageError
from megatron_ext.telemetry import schedule_record
from megatron_ext.telemetry.profiler import StepProfiler
from megatron_ext.telemetry.schedule_record import Place, RankRecord
from megatron_ext.telemetry.schedule_recorder import ScheduleRecorder
from megatron_ext.telemetry.timers import OpenRange
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


class Profiling(Callback):
    """Starts and ends the profiler at its steps, and makes each step a range of its trace."""

    def __init__(self, profiler: StepProfiler, open_range: OpenRange | None = None):
        self._profiler = profiler
        self._open_range = open_range
        self._step: AbstractContextManager[object] | None = None

    def on_step_begin(self, trainer: Trainer) -> None:
        iteration = trainer.position.iteration + 1
        self._profiler.before_step(iteration)
        if self._open_range is not None:
            self._step = self._open_range(f"step {iteration}")
            self._step.__enter__()

    def ends_before_next(self, trainer: Trainer) -> bool:
        return self._open_range is not None

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def on_end(self, trainer: Trainer) -> None:
        self._profiler.finish()

    def close(self) -> None:
        self._profiler.finish()


def begin(config: Config, rank: int, device: Device) -> None:
    """Start recording, on the ranks that the flags ask for."""
    if is_recorded(config, rank):
        device.record_memory_history()


def is_recorded(config: Config, rank: int) -> bool:
    """Return whether this rank's memory is recorded."""
    profiling = config.profiling
    return profiling.record_memory_history and rank in (profiling.profile_ranks or [rank])


class MemoryHistory(Callback):
    """Writes what was recorded at every log line and when the run ends, above all when memory has run out.

    Raises:
        StorageError: the file cannot be written.
    """

    def __init__(self, path: str, rank: int, log_interval: int):
        self.path = Path(path).with_stem(f"{Path(path).stem}_{rank}")
        self._log_interval = log_interval

    def ends_before_next(self, trainer: Trainer) -> bool:
        return False

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        iteration = trainer.run.state.iteration
        if iteration == 1 or iteration % self._log_interval == 0:
            self._write(trainer)

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        with contextlib.suppress(StorageError):  # the error that ends the run must be the one that is seen
            self._write(trainer)

    def on_end(self, trainer: Trainer) -> None:
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            open(self.path, "ab", opener=only_files).close()
            trainer.run.device.write_memory_history(str(self.path))
        except OSError as error:
            raise StorageError(
                f"cannot write --memory-snapshot-path {self.path}: {error.strerror}. Give another path, or leave out "
                "--record-memory-history."
            ) from error


class Schedule(Callback):
    """Records the steps of the range, and writes this rank's trace after the last of them.

    Raises:
        StorageError: the trace cannot be written.
    """

    def __init__(self, run: Run):
        profiling = run.config.profiling
        self._steps = range(profiling.profile_step_start, profiling.profile_step_end)
        self._writes = run.rank in (profiling.profile_ranks or [run.rank])
        self._recorder = ScheduleRecorder(run.device, run.groups.pp, run.chunks)
        self._timers: Any = None

    def on_step_begin(self, trainer: Trainer) -> None:
        run = trainer.run
        if trainer.position.iteration + 1 not in self._steps:
            return
        self._recorder.begin_step()
        self._timers = run.transformer_config.timers
        run.transformer_config.timers = self._recorder.timers(self._timers)
        run.recorder = self._recorder

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        run = trainer.run
        if run.recorder is None:
            return
        run.recorder = None
        run.transformer_config.timers = self._timers
        self._recorder.end_step(run.state.iteration)
        if run.state.iteration + 1 not in self._steps:
            self._write(run)

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        if trainer.run.recorder is not None:
            self._recorder.abandon()

    def on_end(self, trainer: Trainer) -> None:
        self._write(trainer.run)

    def _write(self, run: Run) -> None:
        if not self._writes or not self._recorder.steps:
            return
        schedule_record.write(folder(run.config), RankRecord(_place(run), tuple(self._recorder.steps)))


def folder(config: Config) -> Path:
    """Return the folder of the traces."""
    return Path(config.checkpoint.save or config.logging.tensorboard_dir or ".") / schedule_record.FOLDER


def _place(run: Run) -> Place:
    layout = run.config.layout
    return Place(
        rank=run.rank,
        world_size=run.world_size,
        stage=run.groups.pp.rank(),
        stages=run.groups.pp.size(),
        chunks=len(run.chunks),
        microbatch_group_size=layout.microbatch_group_size,
    )
