"""Runs --profile: some steps under a profiler."""

from megatron_ext.telemetry.profiler import StepProfiler
from megatron_ext.train.trainer import Callback, Trainer


class Profiling(Callback):
    """Starts and ends the profiler at its steps."""

    def __init__(self, profiler: StepProfiler):
        self._profiler = profiler

    def on_step_begin(self, trainer: Trainer) -> None:
        self._profiler.before_step(trainer.run.state.iteration + 1)

    def on_end(self, trainer: Trainer) -> None:
        self._profiler.finish()
