"""--log-communication-share: how this rank's steps divide into computing, communicating, and waiting for a neighbour.

What stands in the way of the computation is timed, and nothing else: on a GPU by events on the stream that computes,
before and after each collective and each wait for one; on a CPU by the clock, on the thread that computes. A collective
that runs on another stream costs nothing until the computation waits for it. Nothing is synchronized: a step's events
are read when a later step has passed them.

    communication   in collectives of every group, and in waits for them; a late rank makes the others wait here
    idle            in sends and receives between pipeline stages: the pipeline's bubble, and the messages themselves
    compute         the rest: kernels, and whatever the host does between them

The methods of torch's process groups are wrapped while the clock runs, which catches every caller: megatron-core keeps
references to torch's functions, but not to these.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from megatron_ext.device.protocol import Device

COMMUNICATION, IDLE = "communication", "idle"
_MESSAGES = ("send", "recv", "recv_anysource")
_COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "gather_single",
    "gather_into_tensor",
    "scatter",
    "barrier",
)
_END_OF_BATCH = "_end_coalescing"  # starts what was put together: messages, or collectives


@dataclass
class _Step:
    """Marks of one step: its two ends, and those of every wait in it."""

    begin: Any
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
        self._originals: list[tuple[type, str, Any]] = []
        self._kinds: weakref.WeakKeyDictionary[Work, str] = weakref.WeakKeyDictionary()
        self._last_kind = threading.local()  # of the operation that a batch will start

    def start(self) -> None:
        """Wrap the methods of torch's process groups."""
        for name in (*_MESSAGES, *_COLLECTIVES, _END_OF_BATCH):
            if hasattr(ProcessGroup, name):  # names come and go with torch's versions
                self._wrap(ProcessGroup, name, self._timed_operation(name))
        self._wrap(Work, "wait", self._timed_wait)

    def stop(self) -> None:
        """Put the methods back."""
        for owner, name, original in self._originals:
            if original is None:
                delattr(owner, name)  # it is inherited
            else:
                setattr(owner, name, original)
        self._originals.clear()

    def begin_step(self) -> None:
        """Mark the beginning of a step."""
        self._step = _Step(self._device.mark())

    def end_step(self) -> None:
        """Mark the end of the step."""
        step, self._step = self._step, None
        assert step is not None, "no step was begun"
        step.end = self._device.mark()
        self._done.append(step)

    def take_waits(self) -> list[tuple[str, Any, Any]]:
        """Return (COMMUNICATION or IDLE, mark before, mark after) of every wait of the steps since the last call, which
        the device has passed."""
        waits = [wait for step in self._done for wait in step.waits]
        self._done.clear()
        return waits

    def take(self) -> torch.Tensor:
        """Return seconds [communication, idle, whole] of the steps that the device has passed since the last call."""
        total = torch.zeros(3, dtype=torch.float64)
        while self._done and self._device.has_passed(self._done[0].end):
            step = self._done.pop(0)
            total[2] += self._device.seconds_between(step.begin, step.end)
            for kind, begin, end in step.waits:
                total[0 if kind == COMMUNICATION else 1] += self._device.seconds_between(begin, end)
        return total

    def _wrap(self, owner: type, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        # What the class holds, not what getattr makes of it: put back, that would no longer be bound to an object.
        self._originals.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, wrapper(getattr(owner, name)))

    def _timed_operation(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def operation(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
                if name == _END_OF_BATCH:
                    kind = getattr(self._last_kind, "value", COMMUNICATION)
                else:
                    kind = IDLE if name in _MESSAGES and group.group_name == self._pipeline else COMMUNICATION
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
    return {
        "compute": (whole - communication - idle) / whole,
        COMMUNICATION: communication / whole,
        IDLE: idle / whole,
    }
