"""Takes a snapshot into the machine's memory every --non-persistent-save-interval steps."""

from megatron_ext.checkpoint.local.writer import SnapshotWriter
from megatron_ext.terminal import say, warn
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer

_FOR_THE_LAST = 5.0  # seconds, after a failure


class Snapshots(Callback):
    """Takes snapshots; when the run ends and is saved, they go.

    Args:
        save_interval: steps at which a checkpoint is written, and no snapshot.
    """

    phase = "the snapshot"

    def __init__(self, writer: SnapshotWriter, interval: int, save_interval: int | None):
        self._writer, self._interval, self._save_interval = writer, interval, save_interval
        self._said = False
        self._warned = False
        self._stopped: float | None = None

    def on_start(self, trainer: Trainer) -> None:
        self._writer.remove_later()

    def ends_before_next(self, trainer: Trainer) -> bool:
        return self._is_due(trainer.position.iteration)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if not self._is_due(trainer.run.state.iteration):
            return
        self._report(trainer)
        self._stopped = self._writer.take()

    def _is_due(self, step: int) -> bool:
        return step % self._interval == 0 and not (self._save_interval and step % self._save_interval == 0)

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        """Let the last one be written, which the restart finds; not for long, since the peer of a copy may be gone."""
        self._writer.join(_FOR_THE_LAST)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.run.config.training.skip_train:
            return  # nothing was saved
        self._writer.forget()
        self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        """Say once what a snapshot costs, and once that one could not be written."""
        self._writer.join()
        if self._writer.problem is not None and not self._warned:
            self._warned = True
            warn(
                f"rank {trainer.run.rank} takes no snapshots any more: {self._writer.problem}. The training goes on; "
                "a restart begins with the last checkpoint, or the last snapshot of all ranks"
            )
        elif self._stopped is not None and not self._said and trainer.run.rank == 0:
            self._said = True
            say(
                f"snapshots: every {self._interval} steps to {self._writer.folder}, {self._writer.bytes / 1e6:,.1f} MB "
                f"of rank 0; training stopped for {self._stopped:.3f} s"
            )
