"""Logs --timing-log-level: how long the parts of a step took, shortest and longest over the ranks."""

import torch

from megatron_ext.telemetry.timers import Timers, timers_text
from megatron_ext.terminal import say
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


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
