"""--log-straggler: names ranks that compute longer than others which do the same work."""

import math
import socket
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron_ext.resilience.verdict import numbers_text
from megatron_ext.telemetry.communication import CommunicationClock
from megatron_ext.telemetry.stragglers import Slowness, SlowRanks
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer

_EVERY = 4  # steps between two exchanges of times
_FIRST_STEPS = 3  # in which kernels are compiled and memory is first taken


class Stragglers(Callback):
    """Exchanges the ranks' compute times and names who is slow. It comes after the clock, before the reports.

    An exchange is begun every fourth step and read four steps later, so that nobody waits for it. What is exchanged
    are the four steps before: the device has passed them, because a step's norm of the gradients has waited for it.
    """

    phase = "the exchange of compute times"

    def __init__(self, clock: CommunicationClock, run: Run):
        self._clock, self._run = clock, run
        self._hosts: list[str] = []
        self._ranks = SlowRanks([])
        self._steps = self._known = 0  # steps taken, and steps whose time is known
        self._times: deque[float] = deque(maxlen=2 * _EVERY)  # of the last known ones
        self._under_way: tuple[Any, torch.Tensor] | None = None
        self._were_slow: set[int] = set()

    def on_start(self, trainer: Trainer) -> None:
        found: list[tuple[str, int]] = [("", 0)] * self._run.world_size
        torch.distributed.all_gather_object(found, (socket.gethostname(), self._run.groups.pp.rank()))
        self._hosts = [host for host, _ in found]
        self._ranks = SlowRanks([stage for _, stage in found])

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self._steps += 1
        if self._steps % _EVERY == 0:
            self._read(trainer.run.state.iteration)
            self._begin()

    def on_end(self, trainer: Trainer) -> None:
        self._read(trainer.run.state.iteration)

    def summary(self) -> Mapping[str, Any] | None:
        """Return the slowest rank, its compute time over its peers', and all ranks that were slow since `forget`; None
        before enough steps were compared."""
        slowest = self._ranks.slowest
        if slowest is None:
            return None
        return {"rank": slowest.rank, "ratio": slowest.ratio, "slow": sorted(self._were_slow | set(self._ranks.slow))}

    def forget(self) -> None:
        """Begin a new interval for `summary`."""
        self._were_slow.clear()

    def _begin(self) -> None:
        """Send the times of the four steps before this one; NaN stands for a time that is not known."""
        taken = self._clock.take_compute()
        self._known += len(taken)
        self._times.extend(taken)
        own = [self._time(step) for step in range(self._steps - _EVERY, self._steps)]
        sent = torch.tensor(own, dtype=torch.float64, device=self._run.device.torch_device)
        times = sent.new_empty(self._run.world_size * _EVERY)
        work = torch.distributed.all_gather_into_tensor(times, sent, async_op=True)
        self._under_way = work, times

    def _time(self, step: int) -> float:
        """Return the seconds of a step, counted from 1."""
        place = step - self._known + len(self._times) - 1
        return self._times[place] if step > _FIRST_STEPS and 0 <= place < len(self._times) else math.nan

    def _read(self, iteration: int) -> None:
        if self._under_way is None:
            return
        work, times = self._under_way
        self._under_way = None
        work.wait()
        for seconds in times.view(-1, _EVERY).T.tolist():
            became, ended = self._ranks.add(seconds)
            self._were_slow |= set(self._ranks.slow)
            if self._run.is_last_rank:
                self._print(iteration, became, ended)

    def _print(self, iteration: int, became: Iterable[Slowness], ended: Iterable[Slowness]) -> None:
        for slow in became:
            print(
                f"straggler at iteration {iteration}: rank {slow.rank} ({self._hosts[slow.rank]}) computes "
                f"{slow.ratio:.2f} times as long as its peers: {1000.0 * slow.seconds:.1f} ms of a step, "
                f"{numbers_text(slow.peers)} {1000.0 * slow.peers_seconds:.1f} ms",
                flush=True,
            )
        for slow in ended:
            print(
                f"straggler at iteration {iteration}: rank {slow.rank} ({self._hosts[slow.rank]}) computes as long as "
                "its peers again",
                flush=True,
            )
