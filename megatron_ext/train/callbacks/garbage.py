"""Collects Python's garbage on all ranks at the same steps (--manual-gc).

Python collects when a rank has made enough objects, which is at another step on each. Every rank then waits, in the
next collective, for the one that collects: with many ranks, at nearly every step for some rank.
"""

import gc

from megatron_ext.telemetry.metrics import Evaluated
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


class GarbageCollection(Callback):
    """Switches the automatic collection off while the training runs.

    What has been built by then is taken out of every later collection (`gc.freeze`), which would look through it again
    each time.

    Args:
        interval: steps between two collections; 0 for none.
        evaluation_interval: steps between two evaluations, before and after which it collects, too; 0 for none.
    """

    def __init__(self, interval: int, evaluation_interval: int):
        self.interval = interval
        self.evaluation_interval = evaluation_interval
        self._collected_by_itself = gc.isenabled()

    def on_start(self, trainer: Trainer) -> None:
        self._collected_by_itself = gc.isenabled()
        gc.disable()
        gc.collect()
        gc.freeze()

    def ends_before_next(self, trainer: Trainer) -> bool:
        return False

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        iteration = trainer.run.state.iteration
        if any(interval and iteration % interval == 0 for interval in (self.interval, self.evaluation_interval)):
            gc.collect()

    def on_evaluation(self, trainer: Trainer, metrics: Evaluated) -> None:
        if self.evaluation_interval:
            gc.collect(0)

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        self.on_end(trainer)

    def on_end(self, trainer: Trainer) -> None:
        """Restore the process's garbage collection, for code that runs after the training."""
        gc.unfreeze()
        if self._collected_by_itself:
            gc.enable()
