"""Warns of gradients far above those of the first steps (--check-for-large-grads).

The bound is megatron-core's (`rerun_state_machine.is_unexpectedly_large`): ten times the largest of a hundred values.
It watches the norm of each rank's buckets, which depends on the layout; here it is the global norm, before clipping.
"""

from megatron_ext.terminal import warn
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer

_STEPS = 100
"""Steps, since the start of the process, whose largest norm is the measure."""

_TIMES = 10.0


class LargeGradients(Callback):
    """Warns, on rank 0, of every step whose gradient norm is unexpectedly large; the step is taken."""

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
