"""Stops the run on request: SIGTERM (what schedulers send before they take a machine away), Ctrl-C, SIGHUP (a terminal
that was closed), or a stop file."""

import contextlib
import os
import signal
import stat
import time
from pathlib import Path
from types import FrameType, TracebackType

STOP_FILE = "stop"
"""Name of the file in --save that stops the run when one does `touch` it."""


class SignalWatcher:
    """Remembers that somebody asked the run to stop; the loop asks between steps, saves and ends.

        with SignalWatcher(stop_file=save / "stop") as watcher:
            while not watcher.requested:
                step()

    SIGTERM, SIGHUP and the first Ctrl-C only set a flag; a second Ctrl-C interrupts at once, without a save. A SIGHUP
    that is ignored, as under `nohup`, stays ignored. Must be entered on the main thread. What handled these signals
    before does so again on leaving (SIGTERM: on leaving without an error; `resilience.report` takes over otherwise).

    Args:
        stop_file: `touch` it to stop the run; removed when seen, so that the next start is not stopped by it.
            Give it on one rank only, which tells the others.
        reason: who has asked already; None where nobody has.
    """

    def __init__(self, stop_file: Path | None = None, reason: str | None = None):
        self._stop_file = stop_file
        self._reason = reason
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
        """Who asked: `SIGTERM`, `SIGINT`, `SIGHUP` or `the file <path>`; None where nobody has."""
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
