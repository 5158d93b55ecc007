"""Runs the clock of --log-communication-share around each step.

Logs --timing-log-level: how long the parts of a step took, shortest and longest over the ranks.
"""

import torch

from megatron_ext.telemetry.communication_clock import CommunicationClock, shares
from megatron_ext.telemetry.timers import Timers, timers_text
from megatron_ext.terminal import say
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


class Communication(Callback):
    """Times communication. It comes first in the list, so that a step ends before anything is reported."""

    def __init__(self, clock: CommunicationClock):
        self._clock = clock

    def on_start(self, trainer: Trainer) -> None:
        self._clock.start()

    def on_step_begin(self, trainer: Trainer) -> None:
        self._clock.begin_step()

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self._clock.end_step()

    def on_failure(self, trainer: Trainer, error: BaseException) -> None:
        self._clock.stop()

    def on_end(self, trainer: Trainer) -> None:
        self._clock.stop()


def shares_of_all_ranks(clock: CommunicationClock, run: Run) -> dict[str, float] | None:
    """Return shares of the ranks' time together since the last call; None where no step has ended. Collective."""
    seconds = clock.take().to(run.device.torch_device)
    if run.world_size > 1:
        torch.distributed.all_reduce(seconds)
    return shares(seconds)


class Timing(Callback):
    """Prints the times of the parts of a step."""

    def __init__(self, timers: Timers, log_interval: int):
        self._timers = timers
        self._log_interval = log_interval
        self._steps = 0

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self._steps += 1
        if trainer.run.state.iteration % self._log_interval:
            return
        of_ranks: list[dict[str, float]] = [{} for _ in range(trainer.run.world_size)]
        torch.distributed.all_gather_object(of_ranks, self._timers.take())
        if trainer.run.is_last_rank:
            say(timers_text(of_ranks, self._steps))
        self._steps = 0
