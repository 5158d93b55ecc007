"""Holds the state that changes while a run trains, besides weights and optimizer state: all is saved and restored."""

from dataclasses import dataclass
from typing import NamedTuple


class Position(NamedTuple):
    """The part of the progress that does not depend on a step's results."""

    iteration: int
    consumed_samples: int
    scheduled_samples: int

    def after(self, batch: int, *, updated: bool) -> "Position":
        """Return the position after a step of `batch` samples."""
        scheduled = self.scheduled_samples + (batch if updated else 0)
        return Position(self.iteration + 1, self.consumed_samples + batch, scheduled)


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

    @property
    def position(self) -> Position:
        """Where the run is."""
        return Position(self.iteration, self.consumed_samples, self.scheduled_samples)

    @position.setter
    def position(self, position: Position) -> None:
        self.iteration, self.consumed_samples, self.scheduled_samples = position

    def start_interval(self) -> None:
        """Forget the sums of the interval that was just logged."""
        self.interval_loss = 0.0
        self.interval_losses = self.interval_skipped = self.interval_nan = 0
