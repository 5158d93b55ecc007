"""Earlier attempts of this launch leave notes for a later one: a stop stays a stop, whatever --max-restarts.

This needs no torch. A launch is one torchrun process per machine, from its start to its end; an attempt is one start of
its ranks. torchrun takes the exit code 75 of a stopped run for a failure and starts the ranks again. These find here
that the run was stopped, and end as it did, at once.

The place is the folder that torchrun makes for a launch, with a random name, for its ranks' error files
(TORCHELASTIC_ERROR_FILE is `LAUNCH/attempt_N/LOCAL_RANK/error.json`). A new launch has a new folder and trains on.
Where there is no such folder (another launcher, or torchrun's `--log-dir /dev/null`) nothing is remembered.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from megatron_ext import environment
from megatron_ext.errors import StoppedBefore, StoppedBySignal
from megatron_ext.untrusted.text import load_json, read_file

_LARGEST = 1 << 20  # bytes of a note
_ASKED, _STOPPED = "stop_asked.json", "stopped.json"


def remember_request(reason: str) -> None:
    """Note that the ranks agreed to stop. Should this attempt fail before it has saved, the next one stops for it."""
    _write(_ASKED, {"reason": reason})


def requested_before() -> str | None:
    """Return why an earlier attempt of this launch was to stop; None where none was."""
    record = _read(_ASKED)
    return None if record is None else str(record.get("reason"))


def remember_stop(code: int, message: str) -> None:
    """Note that this attempt stopped before the planned end, with the exit code `code` (0 or 75)."""
    _write(_STOPPED, {"code": code, "message": message})


def stopped_before() -> bool:
    """Return whether an earlier attempt of this launch stopped with exit code 0, as after --exit-interval.

    Raises:
        StoppedBefore: an earlier attempt stopped on request, with exit code 75.
    """
    record = _read(_STOPPED)
    if record is None:
        return False
    if record.get("code") == StoppedBySignal.exit_code:
        raise StoppedBefore(
            f"{record.get('message')} (restart {environment.attempt()} of this launch: nothing was started)"
        )
    return True


def _write(name: str, content: dict[str, Any]) -> None:
    folder = _folder()
    if folder is None:
        return
    with contextlib.suppress(OSError):
        temporary = folder / f"{name}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps({**content, "attempt": environment.attempt()}), encoding="utf-8")
        temporary.replace(folder / name)


def _read(name: str) -> dict[str, Any] | None:
    """Return the record that an earlier attempt of this launch wrote under this name; None without one.

    torchrun's count of restarts is not raised where it stops the ranks with SIGTERM because machines come or go: that
    is no stop, and the next attempt resumes from the last save.
    """
    folder = _folder()
    if folder is None:
        return None
    try:
        content = load_json(read_file(folder / name, _LARGEST))
        return content if int(content["attempt"]) < environment.attempt() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _folder() -> Path | None:
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parents[2] if error_file and len(Path(error_file).parents) > 2 else None
