"""What the training loop tells its callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_ext.telemetry.metrics import ValidationMetrics

if TYPE_CHECKING:
    from megatron_ext.train.step import StepResult
    from megatron_ext.train.trainer import Trainer


class Callback:
    """Override what you need. Called on every rank, in the order of the list, so that collectives may be used."""

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step; the state may come from a checkpoint."""

    def on_step_begin(self, trainer: Trainer) -> None:
        """Before the microbatches of a step."""

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """After a step; the state already counts it."""

    def on_validation(self, trainer: Trainer, metrics: ValidationMetrics) -> None:
        """After an evaluation."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step of this process, unless an error ended it; in the reverse order of the list."""
