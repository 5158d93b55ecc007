"""A failing rank leaves its cause here, for the other ranks and for whoever started the run.

There are two places: `exit.json` in --save, made by the first failing rank only; and, under torchrun, the rank's error
file, whose message torchrun repeats in its summary. torchrun returns 1 whatever its ranks return: `exit.json` has the
code.
"""

import contextlib
import json
import os
import signal
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_ext.untrusted.text import load_json, read_file

_NAME = "exit.json"
_TICK = 0.02  # seconds by which the time of a file may lag behind time.time()


def clear(save: str | Path) -> None:
    """Remove the record of an earlier run; rank 0 calls this at the start, before the ranks meet."""
    with contextlib.suppress(OSError):
        (Path(save) / _NAME).unlink()


def write(save: str | Path | None, *, code: int, rank: int, message: str, iteration: int | None) -> None:
    """Record why this rank ends, unless another was first or there is no `save`.

    `exit.json` holds code, rank, message, iteration (null before the first step) and time (ISO 8601, UTC). A place
    that cannot be written is left out: the error that is being reported matters more.
    """
    if save is None:
        return
    record = {
        "code": code,
        "rank": rank,
        "message": message,
        "iteration": iteration,
        "time": datetime.now(UTC).isoformat(),
    }
    with contextlib.suppress(OSError):
        Path(save).mkdir(parents=True, exist_ok=True)
        with (Path(save) / _NAME).open("x", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def is_there(save: str | Path | None) -> bool:
    """Return whether a rank has recorded why it ends."""
    return save is not None and (Path(save) / _NAME).exists()


def read(save: Path, *, since: float = 0.0) -> dict[str, Any] | None:
    """Return the record of a run's end in its folder; None where there is none, or none that was written at the time
    `since` (seconds, as time.time()) or later."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        path = save / _NAME
        content = load_json(read_file(path, 1 << 20))
        if path.stat().st_mtime >= since - _TICK:
            return {**content, "code": int(content["code"]), "message": str(content.get("message", ""))}
    return None


def tell_launcher(message: str) -> None:
    """Leave the message where torchrun, and this machine's other ranks, look for it; nothing under other launchers."""
    path = _launcher_file()
    if path is None:
        return
    # The form that torch.distributed.elastic.multiprocessing.errors reads; it sorts failures by this time.
    content = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
    with contextlib.suppress(OSError):
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(json.dumps(content), encoding="utf-8")
        temporary.replace(path)  # torchrun fails on half a file


def wait_for_another(save: str | Path | None, seconds: float) -> bool:
    """Return whether another rank records a cause within `seconds`; it returns as soon as one has."""
    deadline = time.monotonic() + seconds
    while not _another_has_recorded(save):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def wait_for_launcher(seconds: float) -> bool:
    """Return whether torchrun ends this rank within `seconds`, for which it must know of another one's failure."""
    ended = threading.Event()
    if _launcher_file() is not None:
        with contextlib.suppress(ValueError):  # not on the main thread
            signal.signal(signal.SIGTERM, lambda *_: ended.set())
            return ended.wait(seconds)
    return False


def _another_has_recorded(save: str | Path | None) -> bool:
    if is_there(save):
        return True
    own = _launcher_file()
    # torchrun lays them out as attempt_<n>/<local rank>/error.json.
    return own is not None and any(path != own for path in own.parent.parent.glob(f"*/{own.name}"))


def _launcher_file() -> Path | None:
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name else None
