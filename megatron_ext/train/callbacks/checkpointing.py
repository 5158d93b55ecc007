"""Save every --save-interval steps and at the end."""

import time

from megatron_ext.checkpoint.save import save_checkpoint
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


class Checkpointing(Callback):
    def __init__(self, folder: str, interval: int | None):
        self.folder = folder
        self.interval = interval
        self.saved_at: int | None = None

    def on_start(self, trainer: Trainer) -> None:
        self.saved_at = trainer.run.state.iteration

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if self.interval and trainer.run.state.iteration % self.interval == 0:
            self._save(trainer)

    def on_end(self, trainer: Trainer) -> None:
        if self.saved_at != trainer.run.state.iteration:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        started = time.perf_counter()
        path = save_checkpoint(trainer.run, self.folder)
        self.saved_at = trainer.run.state.iteration
        if trainer.run.rank == 0:
            print(f"checkpoint: saved {path} in {time.perf_counter() - started:.1f} s", flush=True)
