"""Ends a run in time that SIGTERM asked to stop: its last save may take longer than the machine is left to it.

    with SignalWatcher(...) as signals, StopDeadline(30.0, signals, status, saved):
        trainer.fit()

A thread looks, so that a save that hangs in the file system or in a collective ends too. What it gives up is no
checkpoint yet, and the next save removes it; the newest finished checkpoint is as it was.
"""

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from megatron_ext.errors import StoppedBySignal
from megatron_ext.resilience import exit_record, launch
from megatron_ext.resilience.process_end import RunStatus, end_from_thread
from megatron_ext.resilience.signals import SignalWatcher

_BETWEEN_LOOKS = 0.1  # seconds
_TO_END = 1.0  # seconds before the deadline at which the process begins to end
_FOR_RANK_0 = 0.4  # seconds


class StopDeadline:
    """Ends this process `seconds` after SIGTERM with exit code 75, unless it is left before.

    Args:
        seconds: None: a stop may take as long as it does.
        signals: who remembers the signal.
        status: of this rank. Its watch sees a signal, too, while the main thread waits in C++.
        saved: returns the iterations of the checkpoints in --save, in ascending order.
    """

    def __init__(
        self, seconds: float | None, signals: SignalWatcher, status: RunStatus, saved: Callable[[], Sequence[int]]
    ):
        self._seconds, self._signals, self._status, self._saved = seconds, signals, status, saved
        self._left = threading.Event()

    def __enter__(self) -> "StopDeadline":
        if self._seconds is not None:
            threading.Thread(target=self._run, args=(self._seconds,), name="stop deadline", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._left.set()

    def _run(self, seconds: float) -> None:
        while not self._left.wait(_BETWEEN_LOOKS):
            asked_at = self._asked_at()
            if asked_at is not None and time.monotonic() >= asked_at + max(seconds - _TO_END, 0.0):
                self._end(seconds)

    def _asked_at(self) -> float | None:
        watch = self._status.watch
        found = (self._signals.terminated_at, None if watch is None else watch.terminated_at)
        return min((time for time in found if time is not None), default=None)

    def _end(self, seconds: float) -> None:
        """Say so on one rank, and end."""
        status, text = self._status, self._text(seconds)
        message = f"rank {status.rank}: {text}"
        if self._signals.for_good:
            launch.remember_stop(StoppedBySignal.exit_code, text)
        if status.rank != 0:
            exit_record.wait_for_another(status.save, _FOR_RANK_0)
        said = exit_record.is_there(status.save)
        end_from_thread(
            None if said else text,
            StoppedBySignal.exit_code,
            status,
            before_exit=lambda: None if said else exit_record.tell_launcher(message),
        )

    def _text(self, seconds: float) -> str:
        save = self._status.save
        where = "before the first step" if self._status.iteration is None else f"at iteration {self._status.iteration}"
        given_up = f"stopped {where}: SIGTERM; --exit-signal-deadline {seconds:g} (seconds) is over"
        if save is None:
            return f"{given_up}; nothing saved: no --save"
        saved = self._saved()
        if not saved:
            return f"{given_up} before a checkpoint was finished; {save} holds none. Give it more time"
        return (
            f"{given_up} before this step was saved; the newest checkpoint in {save} is that of iteration {saved[-1]}; "
            f"start again with --load {save}, and give it more time or a smaller --save-interval"
        )
