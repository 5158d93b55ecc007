"""How this rank's steps divide into computing, communicating, and waiting for a neighbour.

--log-communication-share logs it; --log-straggler compares the computing of ranks that do the same work.

Only waits of the computation are timed: on a GPU by events on the stream that computes, before and after each
collective and each wait for one; on a CPU by the clock, on the thread that computes. A collective that runs on another
stream costs nothing until the computation waits for it. Nothing is synchronized: a step's events are read when a later
step has passed them.

    communication   in collectives of every group, and in waits for them; a late rank makes the others wait here
    idle            in sends and receives between pipeline stages: the pipeline's bubble, and the messages themselves
    compute         the rest: kernels, and whatever the host does between them

On a CPU a rank may be ready to compute while another process has its core. `ComputeTime.own` leaves that time out;
sleeping and reading files count as own time. (Only the thread that computes is measured: its waits for other threads of
the process that wait for a core count as own time, and so does time that a virtual machine's host takes.) Nor do all
cores run equally fast at all times: one that shares its arithmetic units with another busy one, which may belong to
another virtual machine, computes the same in 1.3 times as long. A fixed loop after each step tells.

The methods of torch's process groups are wrapped while the clock runs, which catches every caller.
"""

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup, Work

from megatron_ext.device.device_protocol import Device
from megatron_ext.parallel.operations import COLLECTIVES, END_OF_BATCH, MESSAGES, WrappedMethods

COMMUNICATION, IDLE = "communication", "idle"
_KEPT_STEPS = 64


class ComputeTime(NamedTuple):
    """How long a rank computed in one step."""

    seconds: float
    """Time by the clock."""

    own: float
    """Time by the clock, without the time in which it was ready to go on and others had its core."""

    loop: float = 0.0
    """Seconds of the device's fixed loop, before or after the step, the longer; 0 on a GPU."""


@dataclass
class _Step:
    """Marks of one step: its begin and end, and the begin and end of every wait in it."""

    begin: Any
    held_up: float
    """Seconds that the thread waited for a core: before the step; once this has ended, within it."""
    loop: float
    """Seconds of the fixed loop: before the step; once this has ended, the longer of both."""
    end: Any = None
    waits: list[tuple[str, Any, Any]] = field(default_factory=list)


class CommunicationClock:
    """Times the steps of this rank between `begin_step` and `end_step`.

    Args:
        device: the device whose marks are taken.
        pipeline: the group whose messages are the pipeline's.
    """

    def __init__(self, device: Device, pipeline: ProcessGroup | None):
        self._device = device
        self._pipeline = None if pipeline is None else pipeline.group_name
        self._step: _Step | None = None
        self._done: list[_Step] = []
        self._total = torch.zeros(3, dtype=torch.float64)
        self._compute: deque[ComputeTime] = deque(maxlen=_KEPT_STEPS)
        self._methods = WrappedMethods()
        self._kinds: weakref.WeakKeyDictionary[Work, str] = weakref.WeakKeyDictionary()
        self._last_kind = threading.local()  # of the operation that a batch will start
        self._last_loop = 0.0

    def start(self) -> None:
        """Wrap the methods of torch's process groups."""
        for name in (*MESSAGES, *COLLECTIVES, END_OF_BATCH):
            self._methods.wrap(ProcessGroup, name, self._timed_operation(name))
        self._methods.wrap(Work, "wait", self._timed_wait)

    def stop(self) -> None:
        """Put the methods back."""
        self._methods.put_back()

    def begin_step(self) -> None:
        """Mark the beginning of a step."""
        held_up = self._device.seconds_without_processor()
        self._step = _Step(self._device.mark(), held_up, self._last_loop)

    def end_step(self) -> None:
        """Mark the end of the step."""
        step, self._step = self._step, None
        assert step is not None, "no step was begun"
        step.end = self._device.mark()
        step.held_up = self._device.seconds_without_processor() - step.held_up
        self._last_loop = self._device.seconds_of_a_fixed_loop()
        step.loop = max(step.loop, self._last_loop)
        self._done.append(step)

    def take(self) -> torch.Tensor:
        """Return seconds [communication, idle, whole] of the steps that the device has passed since the last call."""
        self._read_passed()
        total, self._total = self._total, torch.zeros(3, dtype=torch.float64)
        return total

    def take_compute(self) -> list[ComputeTime]:
        """Return how long this rank computed in each step that the device has passed since the last call, the last 64
        at most."""
        self._read_passed()
        times = list(self._compute)
        self._compute.clear()
        return times

    def _read_passed(self) -> None:
        while self._done and self._device.has_passed(self._done[0].end):
            step = self._done.pop(0)
            seconds = torch.zeros(3, dtype=torch.float64)
            seconds[2] = self._device.seconds_between(step.begin, step.end)
            for kind, begin, end in step.waits:
                seconds[0 if kind == COMMUNICATION else 1] += self._device.seconds_between(begin, end)
            self._total += seconds
            self._compute.append(self._compute_time(step, float(seconds[2] - seconds[0] - seconds[1])))

    def _compute_time(self, step: _Step, seconds: float) -> ComputeTime:
        if step.held_up == 0.0:
            return ComputeTime(seconds, seconds, step.loop)
        between = self._device.seconds_run_between
        run = between(step.begin, step.end) - sum(between(begin, end) for _, begin, end in step.waits)
        # Some of the wait for a core came after a wait for others: no more was lost than what was not run.
        return ComputeTime(seconds, seconds - max(0.0, min(step.held_up, seconds - run)), step.loop)

    def _timed_operation(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def operation(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
                if name == END_OF_BATCH:
                    kind = getattr(self._last_kind, "value", COMMUNICATION)
                else:
                    kind = IDLE if name in MESSAGES and group.group_name == self._pipeline else COMMUNICATION
                    self._last_kind.value = kind
                work = self._timed(kind, original, group, *args, **kwargs)
                if work is not None:
                    self._kinds[work] = kind
                return work

            return operation

        return wrapper

    def _timed_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            return self._timed(self._kinds.get(work, COMMUNICATION), original, work, *args, **kwargs)

        return wait

    def _timed(self, kind: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = self._step
        begin = self._device.mark() if step is not None else None
        result = original(*args, **kwargs)
        if step is not None and begin is not None:
            end = self._device.mark()
            if end is not None:
                step.waits.append((kind, begin, end))
        return result


def shares(seconds: torch.Tensor) -> dict[str, float] | None:
    """Return shares of the whole, from seconds [communication, idle, whole]; None where no step was taken."""
    communication, idle, whole = seconds.tolist()
    if whole <= 0.0:
        return None
    return {"compute": (whole - communication - idle) / whole, COMMUNICATION: communication / whole, IDLE: idle / whole}
