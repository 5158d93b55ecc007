"""Runs --record-schedule: in some steps, when each rank runs which pass."""

from pathlib import Path
from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.telemetry import schedule_record
from megatron_ext.telemetry.schedule_record import Place, RankRecord
from megatron_ext.telemetry.schedule_recorder import ScheduleRecorder
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


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
