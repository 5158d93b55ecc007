"""Takes a snapshot into the machine's memory every --non-persistent-save-interval steps, and finds it at a restart."""

from megatron_ext.checkpoint.native.resume import NewerState
from megatron_ext.config.schema import flags_of
from megatron_ext.plugins.snapshots.flags import SnapshotFlags
from megatron_ext.plugins.snapshots.newest_snapshot import newest_snapshot
from megatron_ext.plugins.snapshots.writer import SnapshotWriter, restore_snapshot
from megatron_ext.terminal import say, warn
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer

_FOR_THE_LAST = 5.0  # seconds, after a failure


class Snapshots(Callback):
    """Takes a snapshot of this rank's training state every `interval` steps, for a restart; removes the snapshots when
    the run ends and is saved.

    Args:
        writer: writes the snapshots.
        interval: steps between snapshots.
        save_interval: steps between checkpoints, if any are saved; a step that saves a checkpoint takes no snapshot.
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
        """Let the last snapshot be written, which the restart finds; wait a short time only, since the peer of a copy
        may be gone."""
        self._writer.join(_FOR_THE_LAST)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.run.config.training.skip_train:
            return  # nothing was saved
        self._writer.forget()
        self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        """Print once the cost of a snapshot, and once that a snapshot could not be written."""
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


def callbacks(run: Run) -> list[Callback]:
    """Return the callback that takes snapshots, where the flags ask for them."""
    flags = run.config.checkpoint
    interval = flags_of(flags, SnapshotFlags).non_persistent_save_interval
    return [] if interval is None else [Snapshots(SnapshotWriter(run), interval, flags.save_interval)]


CALLBACKS = (callbacks,)
NEWER_STATES = (NewerState(newest_snapshot, restore_snapshot),)
