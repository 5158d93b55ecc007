"""Holds what changes while a run trains, besides weights and optimizer state. All of it is saved and restored."""

from dataclasses import dataclass


@dataclass
class TrainState:
    """The progress of a run; equal on every rank."""

    iteration: int = 0
    """Number of optimizer steps done, skipped ones included."""

    consumed_samples: int = 0
    """Number of training samples read: the position in the data."""

    consumed_tokens: int = 0
    """Number of tokens that counted in the loss."""

    scheduled_samples: int = 0
    """Number of samples of the steps that updated the weights: the position on the learning-rate curve. Steps skipped
    by the fp16 loss scale do not move it, as in Megatron-LM."""

    interval_loss: float = 0.0
    """Sum of the losses since the last log line, over `interval_losses` steps."""

    interval_losses: int = 0
    interval_skipped: int = 0
    interval_nan: int = 0

    def start_interval(self) -> None:
        """Forget the sums of the interval that was just logged."""
        self.interval_loss = 0.0
        self.interval_losses = self.interval_skipped = self.interval_nan = 0
