"""Decides, together on all ranks, when to stop before the planned end."""

import time

import torch

from megatron_ext.resilience import launcher
from megatron_ext.resilience.signals import SignalWatcher
from megatron_ext.train.step import StepResult
from megatron_ext.train.step_allreduce import StopVotes
from megatron_ext.train.trainer import Callback, Trainer

_BY_SIGTERM, _OTHERWISE = 1, 2


class Stopping(Callback):
    """Stops on a signal, after --exit-duration-in-mins, or at a multiple of --exit-interval.

    A signal reaches each rank at its own moment and clocks differ: the ranks agree once per step, by the maximum
    of what each has seen, or where numbers are read late (train/deferred_reads.py) within the vector of the step.

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
        self.deadline = None if exit_duration_in_mins is None else signals.begun_at + 60.0 * exit_duration_in_mins

    def ends_before_next(self, trainer: Trainer) -> bool:
        return self._at_exit_interval(trainer.position.iteration)

    def votes(self) -> StopVotes:
        asked = self._asked()
        return StopVotes(asked == _BY_SIGTERM, asked == _OTHERWISE, self._is_overdue())

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        signalled, overdue = self._of_all_ranks(trainer)
        if signalled:
            reason = self.signals.reason or "another rank was asked to stop"
            self.signals.for_good = not self.elastic or signalled > _BY_SIGTERM
            if self.signals.for_good:
                launcher.remember_request(reason)
            trainer.stop(reason, by_signal=True)
        elif overdue:
            trainer.stop("--exit-duration-in-mins is over")
        elif self._at_exit_interval(trainer.run.state.iteration):
            trainer.stop(f"--exit-interval {self.exit_interval}")

    def _of_all_ranks(self, trainer: Trainer) -> tuple[int, bool]:
        """Return the kind of request by which some rank was asked to stop (0: none), and whether the time is over."""
        votes = trainer.stop_votes
        if votes is not None:
            return (_OTHERWISE if votes.otherwise else _BY_SIGTERM if votes.by_sigterm else 0), votes.overdue > 0
        seen = torch.tensor(
            [self._asked(), self._is_overdue()], dtype=torch.int32, device=trainer.run.device.torch_device
        )
        if trainer.run.world_size > 1:
            torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
        signalled, overdue = seen.tolist()
        return signalled, bool(overdue)

    def _at_exit_interval(self, iteration: int) -> bool:
        return bool(self.exit_interval) and iteration % self.exit_interval == 0

    def _is_overdue(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline

    def _asked(self) -> int:
        """Return whether this rank was asked to stop, and whether by another than SIGTERM."""
        if not self.signals.requested:
            return 0
        return _BY_SIGTERM if self.signals.reason == "SIGTERM" else _OTHERWISE


STAGE_OVER = "the next stage of --stages begins"


class StageEnd(Callback):
    """Stops after `end` iterations, where a stage of --stages is over; never, if that is None."""

    phase = "the end of a stage"

    def __init__(self, end: int | None):
        self.end = end

    def ends_before_next(self, trainer: Trainer) -> bool:
        return trainer.position.iteration == self.end

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if trainer.run.state.iteration == self.end:
            trainer.stop(STAGE_OVER)
