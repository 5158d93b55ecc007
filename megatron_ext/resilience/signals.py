"""Stops the run on request: SIGTERM (what schedulers send before they take a machine away), Ctrl-C, SIGHUP (a terminal
that was closed), or a stop file.

Ends a run in time that SIGTERM asked to stop: its last save may take longer than the machine is left to it.

    with SignalWatcher(...) as signals, StopDeadline(30.0, signals, status, saved):
        trainer.fit()

A thread looks, so that a save that hangs in the file system or in a collective ends too. An unfinished save is no
checkpoint yet, and the next save removes it; the newest finished checkpoint is as it was.
"""

import contextlib
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from megatron_ext.errors import StoppedBySignal
from megatron_ext.resilience import exit_record, launcher
from megatron_ext.resilience.process_end import RunStatus, end_from_thread

STOP_FILE = "stop"
"""Name of the file in --save that stops the run when one does `touch` it."""


class SignalWatcher:
    """Remembers a request to stop the run; the loop checks it between steps, saves and ends.

        with SignalWatcher(stop_file=save / "stop") as watcher:
            while not watcher.requested:
                step()

    SIGTERM, SIGHUP and the first Ctrl-C only set a flag; a second Ctrl-C interrupts at once, without a save. A SIGHUP
    that is ignored, as under `nohup`, stays ignored. Must be entered on the main thread. The earlier handlers of these
    signals return on leaving (SIGTERM: on leaving without an error; `resilience.report` takes over otherwise).

    Args:
        stop_file: `touch` it to stop the run; removed when seen, so that the next start is not stopped by it.
            Give it on one rank only, which tells the others.
        reason: an earlier request to stop; None without one.
    """

    def __init__(self, stop_file: Path | None = None, reason: str | None = None):
        self._stop_file = stop_file
        self._reason = reason
        self.begun_at = time.monotonic()
        """When the run began, all of whose stages are watched."""
        self.terminated_at: float | None = None
        """When the first SIGTERM came (time.monotonic())."""
        self.for_good = True
        """Whether a stop is one for all restarts of the launch; with --elastic, SIGTERM is none: machines come and
        go."""
        self._interrupted = False
        self._before: dict[signal.Signals, signal._HANDLER] = {}
        self._process = os.getpid()

    @property
    def requested(self) -> bool:
        """Whether the run was asked to stop; once true, it stays true."""
        if self._reason is None and self._stop_file is not None and self._is_there(self._stop_file):
            # One that cannot be removed stops the run all the same, and the next start too, which says so.
            with contextlib.suppress(OSError):
                self._stop_file.unlink(missing_ok=True)
            self._reason = f"the file {self._stop_file}"
        return self._reason is not None

    @staticmethod
    def _is_there(path: Path) -> bool:
        try:
            return not stat.S_ISDIR(path.lstat().st_mode)
        except OSError:
            return False

    @property
    def reason(self) -> str | None:
        """Source of the request: `SIGTERM`, `SIGINT`, `SIGHUP` or `the file <path>`; None without a request."""
        return self._reason

    def __enter__(self) -> "SignalWatcher":
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        for number in (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        for number, handler in self._before.items():
            # After an error SIGTERM still only sets the flag: a launcher that ends the ranks because one of them
            # failed must not cut off what this one has to say.
            if error is None or number != signal.SIGTERM:
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked helper (data loader, checkpoint writer) inherits the handler; its parent means to end it.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        if number == signal.SIGTERM and self.terminated_at is None:
            self.terminated_at = time.monotonic()
        if self._reason is None:
            self._reason = signal.Signals(number).name


_BETWEEN_LOOKS = 0.1  # seconds
_TO_END = 1.0  # seconds before the deadline at which the process begins to end
_FOR_RANK_0 = 0.4  # seconds


class StopDeadline:
    """Ends this process `seconds` after SIGTERM with exit code 75, unless it is left before.

    Args:
        seconds: None: a stop may take as long as it does.
        signals: the watcher that remembers the signal.
        status: of this rank. Its watch sees a signal, too, while the main thread waits in C++.
        saved: returns the iterations of the checkpoints in --save, in ascending order.
    """

    def __init__(
        self, seconds: float | None, signals: SignalWatcher, status: RunStatus, saved: Callable[[], Sequence[int]]
    ):
        self._seconds, self._signals, self._status, self._saved = seconds, signals, status, saved
        self._left = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "StopDeadline":
        if self._seconds is not None:
            self._thread = threading.Thread(target=self._run, args=(self._seconds,), name="stop deadline", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._left.set()
        if self._thread is not None:
            self._thread.join(10 * _BETWEEN_LOOKS)  # a caller of `pretrain` finds no thread of the run afterwards

    def _run(self, seconds: float) -> None:
        while not self._left.wait(_BETWEEN_LOOKS):
            asked_at = self._asked_at()
            if asked_at is not None and time.monotonic() >= asked_at + max(seconds - _TO_END, 0.0):
                self._end(seconds)

    def _asked_at(self) -> float | None:
        watch = self._status.watch
        times = (self._signals.terminated_at, None if watch is None else watch.terminated_at)
        return min((time for time in times if time is not None), default=None)

    def _end(self, seconds: float) -> None:
        """Print the cause on one rank, and end."""
        status, text = self._status, self._text(seconds)
        message = f"rank {status.rank}: {text}"
        if self._signals.for_good:
            launcher.remember_stop(StoppedBySignal.exit_code, text)
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


class WakeUp:
    """A pipe into which the interpreter writes the number of every signal that has a handler of Python's.

    It tells a thread of a signal while the main thread waits in C++, where Python's own handlers have to wait too.
    """

    def __init__(self) -> None:
        self.descriptor, self._writer = os.pipe()
        self._before: int | None = None
        for end in (self.descriptor, self._writer):
            os.set_blocking(end, False)

    def start(self) -> None:
        """Begin; does nothing where this is not the main thread."""
        with contextlib.suppress(ValueError):
            self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            os.register_at_fork(after_in_child=_write_nowhere)

    def signals(self) -> bytes:
        """Return the numbers of the signals since the last call; 0 stands for `wake`."""
        with contextlib.suppress(BlockingIOError):
            return os.read(self.descriptor, 4096)
        return b""

    def wake(self) -> None:
        """End the wait of a thread that polls the descriptor."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def stop(self) -> None:
        """Let the interpreter write where it wrote before."""
        if self._before is not None:
            with contextlib.suppress(ValueError):  # not on the main thread
                signal.set_wakeup_fd(self._before)

    def close(self) -> None:
        """Close the descriptors."""
        os.close(self.descriptor)
        os.close(self._writer)


def _write_nowhere() -> None:
    """Let a forked helper (a data loader, a checkpoint writer) not pass its own signals off as its parent's."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
