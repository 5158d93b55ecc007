"""Warns of gradients far larger than in the first steps (--check-for-large-grads), and ends a run whose gradients
overflow at every step of a loss scale that cannot fall, and names the scale that would work.
"""

import math
from bisect import bisect_left

import torch

from megatron_ext.config.derived.batch_size import training_steps
from megatron_ext.config.schema import Config
from megatron_ext.errors import NumericError
from megatron_ext.optim.loss_scale import loss_scale_of
from megatron_ext.terminal import warn
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult, compute_gradients
from megatron_ext.train.trainer import Callback, Trainer

_STEPS = 100
"""Steps, since the start of the process, whose largest norm is the measure."""

_TIMES = 10.0


class LargeGradients(Callback):
    """Warns, on rank 0, of every step whose gradient norm is unexpectedly large; the step is taken.

    The bound is megatron-core's (`rerun_state_machine.is_unexpectedly_large`): ten times the largest of a hundred
    values. It watches the norm of each rank's buckets, which depends on the layout; here it is the global norm, before
    clipping.
    """

    def __init__(self) -> None:
        self._seen, self._largest = 0, 0.0

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        norm = result.grad_norm
        if norm is None:
            return
        if self._seen < _STEPS:
            self._seen, self._largest = self._seen + 1, max(self._largest, norm)
        elif norm >= _TIMES * self._largest and trainer.run.rank == 0:
            warn(
                f"step {trainer.run.state.iteration}: the gradient norm is {norm:.4g}, above {_TIMES:g} times the "
                f"largest of the first {_STEPS} steps, {self._largest:.4g}; --spike-threshold 3 runs such a batch "
                "again and says whether the data or the hardware is at fault"
            )


_PATIENCE = 100
"""Steps in a row that may overflow before the run ends; at most half of the run's steps."""
_HALVINGS = 40
"""Number of halvings of the run's loss scale that are searched for a lower one: fp16 holds numbers of 2^-24 to 2^16."""
_ROOM = 4
"""Factor between the largest scale that does not overflow and the smaller one that is advised: other samples have
larger gradients."""


class Overflows(Callback):
    """Counts steps in a row that overflow at a fixed loss scale, or at the least of a dynamic one. No weight moves in
    them, and without an end the run would go on to its last step.

    Args:
        config: of a run that has a loss scale.
    """

    phase = "the search for a loss scale"

    def __init__(self, config: Config):
        training = config.training
        self._is_fixed = training.loss_scale is not None
        self._least = training.min_loss_scale if training.loss_scale is None else training.loss_scale
        self._most = min(_PATIENCE, max(1, training_steps(config) // 2))
        self._count = 0
        self._is_least = False

    def on_step_begin(self, trainer: Trainer) -> None:
        scale = trainer.run.optimizer.get_loss_scale()
        self._is_least = self._is_fixed or bool(scale <= torch.full_like(scale, self._least))  # both in fp32

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        """Count the step. Collective where it raises.

        Raises:
            NumericError: the last steps all overflowed at the least scale. Every rank raises it.
        """
        if result.tokens == 0:
            return  # all samples were left out
        self._count = self._count + 1 if self._is_least and not result.updated else 0
        if self._count < self._most:
            return
        run, end = trainer.run, trainer.run.state.consumed_samples
        fits = largest_scale_without_overflow(run, range(end - result.global_batch_size, end))
        flag, instead = "--min-loss-scale", ""
        if self._is_fixed:
            flag, instead = "--loss-scale", ", or leave it out for a dynamic scale"
        told = (
            f"the gradients overflowed in all of the last {self._count} steps, to iteration {run.state.iteration}, at "
            f"{flag} {_number(self._least)}, and no weight has changed in them. "
        )
        if fits is None:
            raise NumericError(
                f"{told}Those of the last step overflow at 2^-{_HALVINGS} of it, too: no loss scale would do, for "
                "something in the backward pass is beyond the range whatever the scale. Use --bf16 in place of --fp16"
            )
        raise NumericError(
            f"{told}Those of the last step fit up to a loss scale of {_number(fits)}. Next: give {flag} "
            f"{_number(fits / _ROOM)}{instead}; --bf16 in place of --fp16 needs no loss scale"
        )


def largest_scale_without_overflow(run: Run, samples: range) -> float | None:
    """Return the largest power of 2 up to the present loss scale at which the gradients of these samples do not
    overflow; None where they do at 2^-40 of it. Collective.

    It computes the gradients six times; the last ones stay in place. No weight changes.
    """
    loss_scale = loss_scale_of(run.optimizer)
    assert loss_scale is not None
    highest = math.frexp(float(loss_scale.scale))[1] - 1

    def fits(halvings: int) -> bool:
        assert loss_scale is not None
        with loss_scale.tried(2.0 ** (highest - halvings)):
            compute_gradients(run, samples)
            return not run.optimizer.prepare_grads()

    halvings = bisect_left(range(_HALVINGS + 1), True, key=fits)
    return None if halvings > _HALVINGS else 2.0 ** (highest - halvings)


def _number(value: float) -> str:
    return f"{value:.17g}"
