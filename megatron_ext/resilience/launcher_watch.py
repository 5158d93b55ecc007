"""Ends a rank when its torchrun is gone: no other process could restart it, stop it, or serve its store.

torchrun ends its ranks when it ends, unless it is killed (SIGKILL, the kernel when memory is short). They would then
wait for their peers or the store until a timeout, or train on unattended. A thread looks after the process, so that
a rank that hangs in a collective or in C++ code ends too.
"""

import os
import re
import threading
import time

import psutil

from megatron_ext.errors import PeerLostError
from megatron_ext.resilience.process_end import RunStatus, end_from_thread

_SECONDS_BETWEEN_LOOKS = 0.5


def watch_launcher(status: RunStatus) -> None:
    """Start to look after the torchrun process that started this one; does nothing under other launchers.

    When it is gone, the rank reports so, and ends with exit code 76 together with its helper processes, without a
    save. A process that a user starts from a shell may outlive the shell: only torchrun's ranks are watched.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    agent = _agent()
    if agent is None and os.getppid() != 1:
        return  # started by something else that set torchrun's variables
    threading.Thread(target=_watch, args=(agent, status), name="launcher watch", daemon=True).start()


def _watch(agent: psutil.Process | None, status: RunStatus) -> None:
    while agent is not None and _lives(agent):
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    who = "" if agent is None else f", process {agent.pid}"
    where = f"at iteration {status.iteration}" if status.iteration is not None else "before the first step"
    end_from_thread(
        f"the launcher (torchrun{who}) is gone {where}, killed without a word to its ranks; nothing was saved. Look "
        "for what killed it (the kernel's log, the scheduler's), and start again with --load.",
        PeerLostError.exit_code,
        status,
    )


def _agent() -> psutil.Process | None:
    """Return torchrun's process: the nearest ancestor that runs Python, since a shell script may lie between."""
    try:
        ancestors = psutil.Process().parents()
    except psutil.Error:
        return None
    return next((ancestor for ancestor in ancestors if _runs_python(ancestor)), None)


def _runs_python(process: psutil.Process) -> bool:
    try:
        return re.match(r"python|pypy", os.path.basename(process.exe()), re.IGNORECASE) is not None
    except (psutil.Error, OSError):
        return False


def _lives(process: psutil.Process) -> bool:
    """Return whether the process still runs; a killed process that its parent has not waited for does not, nor does
    another process with its id."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
