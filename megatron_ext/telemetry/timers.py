"""Times the parts of a step, by name.

Timers have the call shape that megatron-core's schedules and optimizers expect of `config.timers`, so that with
--timing-log-level 1 or 2 the engine times its own operations:

    timers = Timers(level=1, synchronize=torch.cuda.synchronize)
    timers("optimizer", log_level=1).start()
    ...
    timers("optimizer").stop()
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

OpenRange = Callable[[str], AbstractContextManager[object]]
"""Returns a named range of a profiler's trace, to be entered and left."""

_RANGES = {"forward-compute": "forward", "backward-compute": "backward"}
"""Names of the engine's timers that a trace calls otherwise."""


class Timer:
    """Adds up the time between `start` and `stop`."""

    def __init__(self, synchronize: Callable[[], None]):
        self.seconds = 0.0
        self._synchronize = synchronize
        self._started: float | None = None

    def start(self, barrier: bool = False) -> None:
        """Begin timing. `barrier` is the engine's and ignored: waiting for the others would hide which rank is late."""
        assert self._started is None, "the timer runs already"
        self._synchronize()
        self._started = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """End timing; `barrier` as in `start`."""
        assert self._started is not None, "the timer was not started"
        self._synchronize()
        self.seconds += time.perf_counter() - self._started
        self._started = None


class _Idle(Timer):
    """A timer above the level, which costs nothing and waits for nothing."""

    def start(self, barrier: bool = False) -> None:
        pass

    def stop(self, barrier: bool = False) -> None:
        pass


class _Ranged(Timer):
    """A timer that also shows as a range in a profiler's trace; `timer` is the timer without the range."""

    def __init__(self, name: str, timer: Timer, open_range: OpenRange):
        self._name = _RANGES.get(name, name)
        self._timer = timer
        self._open_range = open_range
        self._range: AbstractContextManager[object] | None = None

    def start(self, barrier: bool = False) -> None:
        self._timer.start(barrier)
        self._range = self._open_range(self._name)
        self._range.__enter__()

    def stop(self, barrier: bool = False) -> None:
        assert self._range is not None, "the timer was not started"
        self._range.__exit__(None, None, None)
        self._timer.stop(barrier)


class Timers:
    """The timers of one rank, by name.

    Args:
        level: --timing-log-level; timers of a higher level do nothing.
        synchronize: waits until the device has done its work; called only around timers that run.
        open_range: makes every timer, of whatever level, a range of a profiler's trace.
    """

    def __init__(self, level: int, synchronize: Callable[[], None] = lambda: None, open_range: OpenRange | None = None):
        self._level = level
        self._synchronize = synchronize
        self._timers: dict[str, Timer] = {}
        self._idle = _Idle(synchronize)
        self._open_range = open_range
        self._ranged: dict[str, _Ranged] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer `name`; the first call, which says its level, makes it."""
        if self._open_range is None:
            return self._timer(name, log_level)
        if name not in self._ranged:
            self._ranged[name] = _Ranged(name, self._timer(name, log_level), self._open_range)
        return self._ranged[name]

    def _timer(self, name: str, log_level: int | None) -> Timer:
        if name not in self._timers:
            if log_level is None or log_level > self._level:
                return self._idle
            self._timers[name] = Timer(self._synchronize)
        return self._timers[name]

    def take(self) -> dict[str, float]:
        """Return seconds by name since the last call."""
        seconds = {name: timer.seconds for name, timer in self._timers.items()}
        for timer in self._timers.values():
            timer.seconds = 0.0
        return seconds


def timers_text(of_ranks: Sequence[Mapping[str, float]], iterations: int) -> str:
    """Return shortest and longest time per iteration over the ranks, in Megatron's layout; "" if nothing was timed.

    Args:
        of_ranks: result of `Timers.take` on each rank. A name that some ranks lack (a pipeline stage without an
            embedding) counts over those that have it.
        iterations: iterations since the last time.
    """
    names = list(dict.fromkeys(name for seconds in of_ranks for name in seconds))
    if not names:
        return ""
    lines = ["(min, max) time across ranks (ms):"]
    for name in names:
        times = [1000.0 * seconds[name] / iterations for seconds in of_ranks if name in seconds]
        lines.append(f"    {name + ' ':.<48}: ({min(times):.2f}, {max(times):.2f})")
    return "\n".join(lines)
