"""Decides, together on all ranks, when to stop before the planned end."""

import time

import torch

from megatron_ext.resilience import launch
from megatron_ext.resilience.signals import SignalWatcher
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer

_BY_SIGTERM, _OTHERWISE = 1, 2


class Stopping(Callback):
    """Stops on a signal, after --exit-duration-in-mins, or at a multiple of --exit-interval.

    A signal reaches each rank at its own moment and clocks differ: the ranks agree once per step, by the maximum
    of what each has seen.

    Args:
        elastic: whether SIGTERM, by which torchrun takes down the ranks when a machine comes or goes, leaves the
            restarts of the launch to go on.
    """

    phase = "the agreement on whether to stop"

    def __init__(
        self,
        signals: SignalWatcher,
        exit_interval: int | None,
        exit_duration_in_mins: float | None,
        *,
        elastic: bool = False,
    ):
        self.signals = signals
        self.elastic = elastic
        self.exit_interval = exit_interval
        self.deadline = None if exit_duration_in_mins is None else time.monotonic() + 60.0 * exit_duration_in_mins

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        seen = torch.tensor(
            [self._asked(), self.deadline is not None and time.monotonic() >= self.deadline],
            dtype=torch.int32,
            device=trainer.run.device.torch_device,
        )
        if trainer.run.world_size > 1:
            torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
        signalled, overdue = seen.tolist()
        if signalled:
            reason = self.signals.reason or "another rank was asked to stop"
            self.signals.for_good = not self.elastic or signalled > _BY_SIGTERM
            if self.signals.for_good:
                launch.remember_request(reason)
            trainer.stop(reason, by_signal=True)
        elif overdue:
            trainer.stop("--exit-duration-in-mins is over")
        elif self.exit_interval and trainer.run.state.iteration % self.exit_interval == 0:
            trainer.stop(f"--exit-interval {self.exit_interval}")

    def _asked(self) -> int:
        """Return whether this rank was asked to stop, and whether by another than SIGTERM."""
        if not self.signals.requested:
            return 0
        return _BY_SIGTERM if self.signals.reason == "SIGTERM" else _OTHERWISE
