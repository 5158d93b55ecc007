"""Runs --profile: some steps under a profiler."""

from contextlib import AbstractContextManager

from megatron_ext.telemetry.profiler import StepProfiler
from megatron_ext.telemetry.timers import OpenRange
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
