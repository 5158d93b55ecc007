"""Runs the clock of --log-communication-share around each step; with --log-straggler, names ranks that compute longer
than others which do the same work.
"""

import math
import socket
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron_ext.device.device_protocol import Device
from megatron_ext.plugins.rank_times.communication_clock import CommunicationClock, ComputeTime, shares
from megatron_ext.plugins.rank_times.stragglers import Slowness, SlowRanks
from megatron_ext.resilience.hang_diagnosis import numbers_text
from megatron_ext.terminal import say
from megatron_ext.train.callbacks.reporting import Measure
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Trainer


class Communication(Measure):
    """Times communication. It comes first in the list, so that a step ends before anything is reported.

    Args:
        clock: started and stopped with the run.
        reports: whether the shares of the ranks' time are reported.
    """

    def __init__(self, clock: CommunicationClock, *, reports: bool):
        self._clock, self._reports = clock, reports

    def measured(self, trainer: Trainer) -> dict[str, Any]:
        """Return the shares of the ranks' time together since the last call. Collective."""
        return {"time_shares": shares_of_all_ranks(self._clock, trainer.run)} if self._reports else {}

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


_EVERY = 2  # steps between two exchanges of times
_FIRST_STEPS = 3  # in which kernels are compiled and memory is first taken
_UNKNOWN = ComputeTime(math.nan, math.nan, math.nan)


class Stragglers(Measure):
    """Exchanges the ranks' compute times and names who is slow. It comes after the clock, before the reports.

    An exchange is begun every second step and read once its result has arrived: on a CPU after the next step, on a GPU
    after the one that follows. Nobody waits for it, because a step has collectives of all ranks behind it. The times of
    the two steps before are exchanged: the device has passed them, because a step's norm of the gradients has waited
    for it. So a step is compared three or four steps later at the latest.
    """

    phase = "the exchange of compute times"

    def __init__(self, clock: CommunicationClock, run: Run):
        self._clock, self._run = clock, run
        self._hosts: list[str] = []
        self._ranks = SlowRanks([])
        self._steps = self._known = 0  # steps taken, and steps whose time is known
        self._times: deque[ComputeTime] = deque(maxlen=2 * _EVERY)  # of the last known ones
        self._under_way: deque[_Exchange] = deque()
        self._were_slow: set[int] = set()

    def on_start(self, trainer: Trainer) -> None:
        ranks: list[tuple[str, int]] = [("", 0)] * self._run.world_size
        torch.distributed.all_gather_object(ranks, (socket.gethostname(), self._run.groups.pp.rank()))
        self._hosts = [host for host, _ in ranks]
        self._ranks = SlowRanks([stage for _, stage in ranks])

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self._steps += 1
        self._read(trainer.run.state.iteration)
        if self._steps % _EVERY == 0:
            self._begin()

    def on_end(self, trainer: Trainer) -> None:
        self._read(trainer.run.state.iteration)

    def summary(self) -> Mapping[str, Any] | None:
        """Return the slowest rank, its compute time over its peers', and all ranks that were slow since `forget`; None
        before enough steps were compared."""
        slowest = self._ranks.slowest
        if slowest is None:
            return None
        return {"rank": slowest.rank, "ratio": slowest.ratio, "slow": sorted(self._were_slow | self._ranks.slow)}

    def measured(self, trainer: Trainer) -> dict[str, Any]:
        """Return `summary` for the metrics."""
        return {"slowest_rank": self.summary()}

    def forget(self) -> None:
        """Begin a new interval for `summary`."""
        self._were_slow.clear()

    def _begin(self) -> None:
        """Send the times of the two steps before this one; NaN stands for a time that is not known."""
        new_times = self._clock.take_compute()
        self._known += len(new_times)
        self._times.extend(new_times)
        own = [self._time(step)[1:] for step in range(self._steps - _EVERY, self._steps)]
        # Made on a GPU it would wait for what the GPU has been given.
        sent = torch.tensor(own, dtype=torch.float64).view(-1).to(self._run.device.torch_device, non_blocking=True)
        times = sent.new_empty(self._run.world_size * len(sent))
        work = torch.distributed.all_gather_into_tensor(times, sent, async_op=True)
        self._under_way.append(_Exchange(work, times))

    def _time(self, step: int) -> ComputeTime:
        """Return the time of a step; steps are counted from 1."""
        index = step - self._known + len(self._times) - 1
        return self._times[index] if step > _FIRST_STEPS and 0 <= index < len(self._times) else _UNKNOWN

    def _read(self, iteration: int) -> None:
        """Compare the steps of the exchanges whose results have arrived."""
        while self._under_way and (times := self._under_way[0].times(self._run.device)) is not None:
            self._under_way.popleft()
            for own, loops in times.view(self._run.world_size, _EVERY, -1).permute(1, 2, 0).tolist():
                became, ended = self._ranks.add(own, loops)
                self._were_slow |= self._ranks.slow
                if self._run.is_last_rank:
                    self._print(iteration, became, ended)

    def _print(self, iteration: int, became: Iterable[Slowness], ended: Iterable[Slowness]) -> None:
        for slow in became:
            times = f"{1000.0 * slow.seconds:.1f} ms of a step, {numbers_text(slow.peers)}"
            peers = f"{times} {1000.0 * slow.peers_seconds:.1f} ms"
            self._say(iteration, slow, f"computes {slow.ratio:.2f} times as long as its peers: {peers}")
        for slow in ended:
            self._say(iteration, slow, "computes as long as its peers again")

    def _say(self, iteration: int, slow: Slowness, what: str) -> None:
        host = self._hosts[slow.rank]
        say(f"straggler at iteration {iteration}: rank {slow.rank} ({host}) {what}")


class _Exchange:
    """Times on their way from all ranks."""

    def __init__(self, work: Any, times: torch.Tensor):
        self._work, self._times = work, times
        self._copied: tuple[torch.Tensor, Any] | None = None  # to the host, and a mark after that

    def times(self, device: Device) -> torch.Tensor | None:
        """Return the times, in host memory; None while the device has not copied them, which begins with the first
        call. All ranks have sent their times when the copy is made."""
        if self._copied is None:
            self._work.wait()
            self._copied = self._times.to("cpu", non_blocking=True), device.mark()
        times, mark = self._copied
        return times if device.has_passed(mark) else None


def measures(run: Run) -> list[Measure]:
    """Return the clock and the comparison of ranks that the flags ask for."""
    logging = run.config.logging
    if not (logging.log_communication_share or logging.log_straggler):
        return []
    clock = CommunicationClock(run.device, run.groups.pp)
    communication = Communication(clock, reports=logging.log_communication_share)
    return [communication, *([Stragglers(clock, run)] if logging.log_straggler else [])]


MEASURES = (measures,)
