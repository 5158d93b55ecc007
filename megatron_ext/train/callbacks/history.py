"""Keeps the losses of a run for what `pretrain` returns."""

from array import array

from megatron_ext.telemetry.metrics import Evaluated, ValidationMetrics
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


class History(Callback):
    """Remembers the loss of every step, in 8 bytes, and of every evaluation on the validation data."""

    def __init__(self) -> None:
        self.losses = array("d")
        self.validation_losses: dict[int, float] = {}

    def ends_before_next(self, trainer: Trainer) -> bool:
        return False

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self.losses.append(result.loss)

    def on_evaluation(self, trainer: Trainer, metrics: Evaluated) -> None:
        if isinstance(metrics, ValidationMetrics):
            self.validation_losses[metrics.iteration] = metrics.validation_loss
