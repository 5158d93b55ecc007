"""The one vector of numbers that every step sums over all ranks."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_ext.resilience.numeric import largest_magnitude
from megatron_ext.sharding.gradients import outside_norm
from megatron_ext.train.run import Run


class StopVotes(NamedTuple):
    """How many ranks ask to stop, by why they do."""

    by_sigterm: int = 0
    otherwise: int = 0
    """Ranks that were asked by another signal than SIGTERM, or by the stop file."""
    overdue: int = 0


class Summed(NamedTuple):
    """What all ranks have together."""

    loss: float
    """Mean loss per token; NaN where no token counts."""
    tokens: int
    bad_ranks: int
    """Number of ranks with a bad gradient."""
    overflowed_ranks: int
    """Number of ranks in which the loss scale overflowed."""
    votes: StopVotes | None = None
    """None where the ranks agree on a stop by themselves."""
    mtp_losses: tuple[float, ...] = ()
    """Mean loss of each depth of multi-token prediction."""


class SharedNumbers:
    """Holds what this rank contributes to the vector."""

    def __init__(self, run: Run):
        self._run = run
        self._depths = run.config.model.mtp_num_layers or 0
        self._vector = torch.zeros(4 + self._depths, dtype=torch.float64, device=run.device.torch_device)
        self.loss = self._vector[0].clone()

    def add_loss(self, share: torch.Tensor) -> None:
        """Add the sum of losses, the number of tokens, and the sum of each depth, fp64 [2 + depths]."""
        self._vector[:2], self._vector[4:] = share[:2], share[2:]
        self.loss.copy_(share[0])

    def add_gradients(self, overflow: bool, grad_norm: float) -> None:
        """Add whether a gradient is NaN or infinite here, in the norm or not; an overflow of the loss scale is not
        bad."""
        if overflow:
            self._vector[3] = 1.0
        elif math.isfinite(grad_norm):
            # NaN and infinity in any other gradient show in the norm. It does not wait for the device.
            self._vector[2] = ~self._left_out().isfinite()
        else:
            self._vector[2] = 1.0

    def summed(self) -> Summed:
        """Return what all ranks have. Collective."""
        self._sum()
        return summed(self._vector.tolist(), self._depths)

    def add_gradients_of(self, grad_norm: torch.Tensor) -> None:
        """Add the same for a norm that is on the device, without a loss scale and without reading it."""
        self._vector[2] = ~(grad_norm.isfinite() & self._left_out().isfinite())

    def summed_on_device(self, votes: StopVotes) -> torch.Tensor:
        """Return what `summed` takes, fp64 [7 + depths], on the device. Collective."""
        asked = self._vector.new_zeros(len(votes))
        for slot, vote in enumerate(votes):
            if vote:
                asked[slot] = float(vote)
        self._vector = torch.cat([self._vector, asked])
        self._sum()
        return self._vector

    def _sum(self) -> None:
        if self._run.world_size > 1:
            torch.distributed.all_reduce(self._vector)

    def _left_out(self) -> torch.Tensor:
        """Return the largest magnitude in the gradients that are not in the norm."""
        return largest_magnitude(outside_norm(self._run.optimizer), self._vector.device)


def summed(numbers: Sequence[float], depths: int = 0) -> Summed:
    """Return the numbers by their names: the loss, tokens and ranks, losses of depths, and the votes if there are
    any."""
    loss_sum, tokens, bad, overflowed, *rest = numbers
    ahead, votes = rest[:depths], rest[depths:]
    asked = StopVotes(*map(int, votes)) if votes else None
    of_depths = tuple(mean_loss(one, tokens) for one in ahead)
    return Summed(mean_loss(loss_sum, tokens), int(tokens), int(bad), int(overflowed), asked, of_depths)


def mean_loss(loss_sum: float, tokens: float) -> float:
    """Return the mean over the tokens; NaN where there are none."""
    return loss_sum / tokens if tokens else math.nan
