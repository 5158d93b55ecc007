"""The one vector of numbers that every step sums over all ranks, and why they end the run: whose gradient it was, or
that no token counts.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_ext.errors import DataError, NumericError
from megatron_ext.model.names import global_named_parameters
from megatron_ext.parallel.rows import local_part
from megatron_ext.resilience.numeric import first_bad, largest_magnitude
from megatron_ext.sharding.parts import gradients_of_update, outside_norm
from megatron_ext.train.gradient_watch import Evidence, Finding
from megatron_ext.train.run import Run


class StopVotes(NamedTuple):
    """Numbers of ranks that ask to stop, by reason."""

    by_sigterm: int = 0
    otherwise: int = 0
    """Ranks that were asked by another signal than SIGTERM, or by the stop file."""
    overdue: int = 0


# Loss, tokens and ranks come first in the vector, then the votes, then what parts of the model recorded.
_VOTES = 4
_OF_PARTS = _VOTES + len(StopVotes._fields)


class Summed(NamedTuple):
    """Numbers of a step over all ranks."""

    loss: float
    """Mean loss per token; NaN where no token counts."""
    tokens: int
    bad_ranks: int
    """Number of ranks with a bad gradient."""
    overflowed_ranks: int
    """Number of ranks in which the loss scale overflowed."""
    votes: StopVotes
    of_parts: tuple[float, ...]
    """Sums of the numbers that the parts of the model have recorded, see `RecordedNumbers.sums`."""


class SharedNumbers:
    """This rank's contribution to the vector that all ranks add up."""

    def __init__(self, run: Run):
        self._run = run
        length = _OF_PARTS + len(run.numbers.summed)
        self._vector = torch.zeros(length, dtype=torch.float64, device=run.device.torch_device)
        self.loss = self._vector[0].clone()

    def add_loss(self, share: torch.Tensor) -> None:
        """Add the sum of losses and the number of tokens, fp64 [2]."""
        self._vector[:2] = share
        self.loss.copy_(share[0])

    def add_gradients(self, overflow: bool, grad_norm: torch.Tensor) -> None:
        """Add whether a gradient is NaN or infinite here, in the norm (fp64, over all ranks) or not, without waiting
        for the device; an overflow of the loss scale is not bad."""
        if overflow:
            self._vector[3] = 1.0
        else:
            # NaN and infinity in any other gradient show in the norm.
            left_out = largest_magnitude(outside_norm(self._run.optimizer), self._vector.device)
            self._vector[2] = ~(grad_norm.isfinite() & left_out.isfinite())

    def summed(self, votes: StopVotes) -> torch.Tensor:
        """Return the numbers of all ranks, fp64, on the device: see `named`. Collective.

        Args:
            votes: whether this rank asks to stop.
        """
        for slot, vote in enumerate(votes, _VOTES):
            if vote:
                self._vector[slot] = float(vote)
        self._vector[_OF_PARTS:] = self._run.numbers.sums()
        if self._run.world_size > 1:
            torch.distributed.all_reduce(self._vector)
        return self._vector


def largest_of_parts(run: Run) -> torch.Tensor:
    """Return the largest numbers that parts of all ranks have recorded, see `RecordedNumbers.largest`. Collective,
    where there is any."""
    largest = run.numbers.largest()
    if len(largest) and run.world_size > 1:
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return largest


def named(numbers: Sequence[float]) -> Summed:
    """Return the numbers of all ranks by their names: the loss, tokens and ranks, votes, and the numbers that parts
    recorded."""
    loss_sum, tokens, bad, overflowed = numbers[:_VOTES]
    votes = StopVotes(*map(int, numbers[_VOTES:_OF_PARTS]))
    of_parts = tuple(numbers[_OF_PARTS:])
    return Summed(mean_loss(loss_sum, tokens), int(tokens), int(bad), int(overflowed), votes, of_parts)


def mean_loss(loss_sum: float, tokens: float) -> float:
    """Return the mean over the tokens; NaN where there are none."""
    return loss_sum / tokens if tokens else math.nan


def check_numbers(run: Run, summed: Summed, global_batch: int, evidence: Evidence) -> None:
    """Raise where the step must not have changed a weight. Collective where it raises.

    Args:
        summed: of all ranks.
        global_batch: samples of the step, which `run.state` does not count.
        evidence: this rank's, of the step.
    Raises:
        NumericError: the loss or a gradient is NaN or infinite on some rank.
        DataError: no token counts in the loss.
    """
    if run.config.training.no_check_for_nan_in_loss_and_grad:
        return
    if summed.tokens == 0:
        raise _nothing_counts(run, global_batch)
    if not math.isfinite(summed.loss):
        raise _numeric_error(run, "loss", evidence)
    if summed.bad_ranks or 0 < summed.overflowed_ranks < run.world_size:
        raise _numeric_error(run, "gradient", evidence)


def _nothing_counts(run: Run, global_batch: int) -> DataError:
    return DataError(
        f"iteration {run.state.iteration + 1} (samples from {run.state.consumed_samples}): not one token of its "
        f"{global_batch} samples counts in the loss. Look at them (megatron-ext inspect-dataset sample), and give a "
        "larger --global-batch-size or other data"
    )


def _numeric_error(run: Run, what: str, evidence: Evidence) -> NumericError:
    """Gather every rank's finding, and name the cause. Collective."""
    seen: list[tuple[Finding | None, ...]] = [()] * run.world_size
    torch.distributed.all_gather_object(
        seen, (_bad_weight(run), run.gradient_watch.diagnose(evidence), _bad_reduced(run, evidence))
    )
    weight, gradient, reduced = (_cause(findings) for findings in zip(*seen, strict=True))
    when = f"iteration {run.state.iteration + 1} (samples from {run.state.consumed_samples})"
    unchecked = "--no-check-for-nan-in-loss-and-grad goes on regardless."
    if weight is not None:
        return NumericError(
            f"{weight}, at the start of {when}: an earlier update, or the memory of that rank, made it so. Next: "
            f"resume from a checkpoint that was saved before it (--ckpt-step); if it happens again at the same step, "
            f"lower --lr; if not, suspect the hardware. {unchecked}"
        )
    where = f"the {what} became bad between the ranks: every rank's own part is finite"
    return NumericError(
        f"{gradient or reduced or where}, {when}. This iteration changed no weight. Next: resume from the last "
        "checkpoint; if it happens again at the same step, lower --lr or look at those samples; if not, suspect the "
        f"hardware. {unchecked}"
    )


def _cause(findings: Sequence[Finding | None]) -> str | None:
    """Return the finding that a backward pass comes to first, on the lowest rank; the others follow from it."""
    causes = [(finding.position, -rank, finding.text) for rank, finding in enumerate(findings) if finding is not None]
    if not causes:
        return None
    _, negative_rank, text = max(causes)
    return f"rank {-negative_rank}: {text}"


def _bad_weight(run: Run) -> Finding | None:
    """Return the first weight of this rank, in the order of a forward pass, that was bad before this step.
    Collective."""
    with run.gathered_parameters():
        bad = first_bad((name, local_part(weight).detach()) for name, weight in global_named_parameters(run.chunks))
    return bad and Finding((0, 0), f"{bad.nan} NaN and {bad.inf} infinite values in the weight {bad.name}")


def _bad_reduced(run: Run, evidence: Evidence) -> Finding | None:
    if not run.gradient_watch.is_of_these_gradients(evidence):
        return None
    return run.gradient_watch.in_reduced_gradients(gradients_of_update(run.sharding.parts(run.optimizer)))
