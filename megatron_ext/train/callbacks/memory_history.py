"""--record-memory-history records every allocation of GPU memory, for pytorch.org/memory_viz.

Recording begins before the model is built (`begin`), so that each block's origin is known.
"""

import contextlib
from pathlib import Path

from megatron_ext.config.schema import Config
from megatron_ext.device.protocol import Device
from megatron_ext.durable import only_files
from megatron_ext.errors import StorageError
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


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
