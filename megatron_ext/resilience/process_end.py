"""Ends a process: the exit code, the last line, and the record that others read.

    status = RunStatus(rank=environment.rank())
    end_process(run_guarded(lambda: main(status), status))

The last line that any rank prints must be the cause, although every other rank fails too once the first is gone. So
a rank that lost its peers first looks for the cause that one of them reported, and then prints nothing itself. A rank
reports its cause before it ends, and its peers only notice its end, so that the report exists when they look for it.
"""

import contextlib
import multiprocessing
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

import psutil

from megatron_ext.errors import ConfigurationError, PeerLostError, StoppedBefore, StoppedBySignal, TrainingError
from megatron_ext.own_code import text_of_own_error
from megatron_ext.resilience import exit_record
from megatron_ext.resilience.progress import Progress
from megatron_ext.terminal import note

# Time for the cause to appear. Longer for what every rank finds for itself, where rank 0 may just be slower to start.
_SECONDS_FOR_A_PEERS_CAUSE = 1.0
_SECONDS_FOR_RANK_0 = 5.0
_SECONDS_FOR_LAUNCHER = 10.0
_SECONDS_FOR_OTHER_RANKS = 1.0
_SECONDS_TO_CLEAN_UP = 5.0

# Texts of gloo, NCCL and the store when the other side is gone or silent (lower case).
_LOST_PEER_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "connection timed out",
    "connection was likely closed",
    "connect timeout",
    "broken pipe",
    "socket closed",
    "application timeout caused pair closure",
    "timed out waiting",
    "socket timeout",
    "socket has timed out",
    "wait timeout",
    "remote process exit",
    "remote worker hanging",
    "watchdog caught collective operation timeout",
)


class PeersWatch(Protocol):
    """The methods of the watch over all ranks (`resilience/watchdog.py`) that a report of an end calls."""

    ending: threading.Event
    """Set once the watch's own thread reports why this process ends, and ends it."""

    terminated_at: float | None
    """When SIGTERM came, by the monotonic clock."""

    def cause_of_loss(self) -> str | None:
        """Return how the first rank to end ended; None if no rank reports it in time."""
        ...

    def speaks_for_all(self) -> bool:
        """Return whether this rank is to report why all ranks end."""
        ...

    def close(self) -> None:
        """End the watch."""
        ...


@dataclass
class RunStatus:
    """Facts about this rank for the report of its end; the program fills them in as it learns them."""

    rank: int
    save: str | None = None  # --save, once known
    iteration: int | None = None  # the step being worked on, from 1
    progress: Progress = field(default_factory=Progress)
    watch: PeersWatch | None = None  # once the ranks have met


def run_guarded(main: Callable[[], int], status: RunStatus) -> int:
    """Run `main` and return the process's exit code; a failure is reported as its rank's last line and recorded.

    Errors of `megatron_ext.errors` give their own code, a lost peer 76, anything else 1 and a traceback. SystemExit
    passes through: it is how argparse ends the process.
    """
    try:
        return main()
    except SystemExit:
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        # The launcher ends every rank soon after the first; this one must still say why.
        with contextlib.suppress(ValueError):  # not on the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return _report(error, status)
    finally:
        if status.watch is not None:
            status.watch.close()


def end_process(code: int) -> NoReturn:
    """End this process with `code`; after a failure at once, whatever threads and collectives still hang.

    The helpers of megatron-core's checkpoint writer outlive os._exit and would keep the launcher's pipes
    open, so multiprocessing ends its children first; if that hangs, they are killed.
    """
    if code == 0:
        sys.exit(0)
    sys.stdout.flush()
    sys.stderr.flush()
    timer = threading.Timer(_SECONDS_TO_CLEAN_UP, _kill_children_and_exit, (code,))
    timer.daemon = True
    timer.start()
    multiprocessing.util._exit_function()  # pyright: ignore[reportAttributeAccessIssue]  # not in its stubs
    os._exit(code)


def end_from_thread(
    text: str | None, code: int, status: RunStatus, *, before_exit: Callable[[], None] = lambda: None
) -> None:
    """Report `text` as this rank's last line and end the process with its helpers, whatever the main thread does.

    Args:
        text: None where another rank reports why all ranks end.
        before_exit: called after the report.
    """
    timer = threading.Timer(_SECONDS_TO_CLEAN_UP, os._exit, (code,))  # a full pipe holds up a writer
    timer.daemon = True
    timer.start()
    try:
        message = f"rank {status.rank}: {text}"
        if text is not None:
            exit_record.write(status.save, code=code, rank=status.rank, message=message, iteration=status.iteration)
        _end_descendants()
        if text is not None:
            _say(message)
        before_exit()
    finally:
        os._exit(code)


def is_lost_peer(error: BaseException) -> bool:
    """Return whether the error says that another rank is gone or does not answer, rather than something of this
    rank."""
    if isinstance(error, PeerLostError):
        return True
    # gloo's errors are RuntimeErrors, so are DistBackendError and DistNetworkError. The text decides: each can mean
    # other things.
    text = str(error).lower() if isinstance(error, RuntimeError) else ""
    return any(known in text for known in _LOST_PEER_TEXTS)


def _report(error: BaseException, status: RunStatus) -> int:
    code = _exit_code(error)
    cause = None
    if code == PeerLostError.exit_code:
        if exit_record.wait_for_another(status.save, _SECONDS_FOR_A_PEERS_CAUSE):
            return code
        if status.watch is not None:
            if status.watch.ending.is_set():
                time.sleep(2 * _SECONDS_TO_CLEAN_UP)  # its thread says why, and ends this process
            cause = status.watch.cause_of_loss()
            if cause is not None and not status.watch.speaks_for_all():
                return code
            if exit_record.wait_for_another(status.save, 0.0):  # meanwhile; and the store may have ended with it
                return code
    elif (
        isinstance(error, ConfigurationError | StoppedBySignal)
        # The record exists already, and the launcher ends rank 0 as soon as another rank has ended: each must say it.
        and not isinstance(error, StoppedBefore)
        and status.rank != 0
        and exit_record.wait_for_another(status.save, _SECONDS_FOR_RANK_0)
    ):
        told = isinstance(error, ConfigurationError) and exit_record.wait_for_launcher(_SECONDS_FOR_LAUNCHER)
        return 0 if told else code  # torchrun's summary ends with the cause, below seven lines for each other failure
    message = _last_line(error, status, cause)
    if isinstance(error, ConfigurationError):
        _say("\n".join(error.problems))
    elif code == 1:
        _say("".join(traceback.format_exception(error)).rstrip())
    _say(message)
    recorded = _without_what_is_above(error, status, message)
    exit_record.write(status.save, code=code, rank=status.rank, message=recorded, iteration=status.iteration)
    if code != PeerLostError.exit_code:  # torchrun would take it for the first cause
        exit_record.tell_launcher(recorded)
    if isinstance(error, ConfigurationError):
        exit_record.wait_for_launcher(_SECONDS_FOR_OTHER_RANKS)  # they find the same, and leave the summary to this one
    return code


def _without_what_is_above(error: BaseException, status: RunStatus, message: str) -> str:
    """Return the message for the record and torchrun's summary, which stand alone: the problems, not where they are."""
    if not isinstance(error, ConfigurationError):
        return message
    return f"rank {status.rank}: {'; '.join(' '.join(problem.split()) for problem in error.problems)}"


def _exit_code(error: BaseException) -> int:
    if is_lost_peer(error):
        return PeerLostError.exit_code
    return error.exit_code if isinstance(error, TrainingError) else 1


def _last_line(error: BaseException, status: RunStatus, cause: str | None) -> str:
    """Return `rank R: what, where, next action`, in one line.

    Args:
        cause: how another rank ended, where that is known.
    """
    started = status.iteration is not None
    where = f"at iteration {status.iteration}" if started else "before the first step"
    resume = " --load resumes from the last checkpoint." if started else ""
    text = " ".join(str(error).split())
    match error:
        case ConfigurationError():
            count = len(error.problems)
            problems = "1 problem" if count == 1 else f"{count} problems"
            what = "nothing was started. Change the flags" if not started else f"found {where}. Correct it"
            text = f"{problems} in the configuration, named above; {what} and start again."
        case TrainingError():
            pass
        case KeyboardInterrupt():
            text = f"interrupted {where}; what was done since the last checkpoint is lost.{resume}"
        case _ if cause is not None:
            text = (
                f"{cause}; lost {where}. Look at what that rank wrote, at the kernel's log (out of memory) and the "
                f"scheduler's, and start again.{resume}"
            )
        case _ if is_lost_peer(error):
            seen = text.split(". ")[0]  # gloo goes on with advice
            text = (
                f"another rank was lost {where}, without a word why ({seen}). Look for what ended it (the kernel's "
                f"log, the scheduler's), and start again.{resume}"
            )
        case _ if (own := text_of_own_error(error)) is not None:
            text = f"{own} ({where}). The traceback above shows the way there.{resume}"
        case _:
            text = (
                f"{type(error).__name__}: {text} ({where}). An unexpected error, most likely a fault of the program: "
                f"report it with the traceback above.{resume}"
            )
    return f"rank {status.rank}: {text}"


def _say(text: str) -> None:
    sys.stdout.flush()
    note(text)


def _end_descendants() -> None:
    """Kill data loaders, checkpoint writers and their own helpers."""
    with contextlib.suppress(psutil.Error):
        for helper in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                helper.kill()


def _kill_children_and_exit(code: int) -> None:
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)
