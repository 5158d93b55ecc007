"""Runs --profile: some steps under a profiler.

--record-memory-history records every allocation of GPU memory, for pytorch.org/memory_viz.

Recording begins before the model is built (`begin`), so that each block's origin is known.
"""

import contextlib
from contextlib import AbstractContextManager
from pathlib import Path

from megatron_ext.config.schema import Config
from megatron_ext.device.device_protocol import Device
from megatron_ext.durable import only_files
from megatron_ext.errors import StorageError
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


def begin(config: Config, rank: int, device: Device) -> None:
    """Start recording, on the ranks that the flags ask for."""
    if is_recorded(config, rank):
        device.record_memory_history()


def is_recorded(config: Config, rank: int) -> bool:
    """Return whether this rank's memory is recorded."""
    profiling = config.profiling
    return profiling.record_memory_history and rank in (profiling.profile_ranks or [rank])


class MemoryHistory(Callback):
    """Writes the recorded allocations at every log line and when the run ends, above all when memory has run out.

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
