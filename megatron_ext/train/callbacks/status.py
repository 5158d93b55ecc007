"""Keeps the failure report informed of the step that is being worked on."""

from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.train.trainer import Callback, Trainer


class Status(Callback):
    """Notes the step in the failure report."""

    def __init__(self, status: RunStatus):
        self._status = status

    def on_step_begin(self, trainer: Trainer) -> None:
        self._status.iteration = trainer.position.iteration + 1

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        # The next step was begun already where numbers are read late.
        begun, after = self._status.iteration, trainer.position.iteration + 1
        self._status.iteration = after if begun is None else min(begun, after)
