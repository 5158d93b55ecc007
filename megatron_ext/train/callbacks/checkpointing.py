"""Saves every --save-interval steps and at the end; with --async-save, while the training goes on."""

import time

from megatron_ext.checkpoint.native.save import Kept, Save
from megatron_ext.errors import FolderRemovedError, NumericError, SaveFailedError, StorageError
from megatron_ext.telemetry.metrics import SaveFailure
from megatron_ext.terminal import say, warn
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


class Checkpointing(Callback):
    """Saves the run, and removes checkpoints that the flags do not keep.

    Args:
        folder: folder of the checkpoints.
        interval: steps between two saves; None: at the end alone.
        background: whether the training goes on while a checkpoint is written.
        outlives_failures: whether the run goes on after a save that failed, the last one aside. After one whose folder
            was removed it does in any case.
    """

    phase = "the save"

    def __init__(self, folder: str, interval: int | None, *, background: bool, outlives_failures: bool = False):
        self.folder = folder
        self.interval = interval
        self.background = background
        self.outlives_failures = outlives_failures
        self.saved_at: int | None = None
        self._save: Save | None = None
        self._kept = Kept()
        self._started = 0.0
        self._stall = 0.0

    def on_start(self, trainer: Trainer) -> None:
        self.saved_at = trainer.run.state.iteration

    def before_update(self, trainer: Trainer) -> None:
        if self._save is not None:
            self._save.hold_update()

    def ends_before_next(self, trainer: Trainer) -> bool:
        return self._is_due(trainer.position.iteration)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if self._save is not None and self._save.written():
            self._finish(trainer)
        if self._is_due(trainer.run.state.iteration):
            self._start(trainer)

    def _is_due(self, iteration: int) -> bool:
        return bool(self.interval) and iteration % self.interval == 0

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        """Finish a background save of an earlier step where all ranks can take part, else warn that it is given up."""
        if self._save is None:
            return
        save = self._save
        try:
            if isinstance(error, NumericError):
                self._finish(trainer)
                return
            reason = ""
        except StorageError as failure:
            reason = f": {failure}"
        if save.run.rank == 0:
            warn(f"the background save of iteration {save.iteration} was not finished and is no checkpoint{reason}")

    def on_end(self, trainer: Trainer) -> None:
        self._finish(trainer)
        if self.saved_at != trainer.run.state.iteration:
            self._start(trainer)
            self._finish(trainer)
        if self.saved_at != trainer.run.state.iteration:  # it failed; now or never
            self._save = Save(trainer.run, self.folder, background=False)
            self._finish(trainer, last=True)

    def close(self) -> None:
        """Wait for the thread of a background save that an error has given up: nobody writes to the folder once the run
        is over."""
        if self._save is not None:
            self._save.join()

    def _start(self, trainer: Trainer) -> None:
        self._finish(trainer)
        self._started = time.perf_counter()
        self.saved_at = iteration = trainer.run.state.iteration
        try:
            self._save = Save(trainer.run, self.folder, background=self.background, kept=self._kept)
        except SaveFailedError as error:
            self._lose(trainer, iteration, error)
        self._stall = time.perf_counter() - self._started
        if not self.background:
            self._finish(trainer)

    def _lose(self, trainer: Trainer, iteration: int, error: SaveFailedError) -> None:
        """Go on without the checkpoint, where the run may: whoever has removed the folder may have meant to, and a run
        is worth more; after another failure the flags say so. Every rank has the same error."""
        if not (self.outlives_failures or isinstance(error, FolderRemovedError)):
            raise error
        self.saved_at = None
        if trainer.run.rank == 0:
            what = "" if isinstance(error, FolderRemovedError) else f"NO CHECKPOINT of iteration {iteration}: "
            said = str(error).replace(", and start again", "")  # which nobody has to: it is written for a run that ends
            warn(f"{what}{said} The run goes on, and saves again at the next interval and at its end")
        trainer.report_save_failure(
            SaveFailure(
                iteration=iteration, consumed_samples=trainer.run.state.consumed_samples, save_failure=str(error)
            )
        )

    def _finish(self, trainer: Trainer, *, last: bool = False) -> None:
        """Wait for the save in progress, if there is one.

        Args:
            last: whether it is the last save, without which the run's progress is lost.
        """
        if self._save is None:
            return
        save, self._save = self._save, None
        try:
            path = save.finish()
        except SaveFailedError as error:
            if last:
                raise
            return self._lose(trainer, save.iteration, error)
        if save.run.rank == 0:
            stall = f" (in the background; training stopped for {self._stall:.1f} s)" if self.background else ""
            say(f"checkpoint: saved {path} in {time.perf_counter() - self._started:.1f} s{stall}")
