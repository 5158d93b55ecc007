"""The real program in real processes, as a user starts it: alone, or by torchrun."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from megatron_ext.forkserver.ranks import forkserver
from megatron_ext.telemetry.metrics import MEASURED_FIELDS
from megatron_ext.untrusted.metrics_rows import read_rows
from tests.support.warm_python import run_words

ROOT = Path(__file__).resolve().parents[2]
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Launched(Protocol):
    """What tests ask of a process; `subprocess.Popen` has it, too."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...


class _Forked:
    """A command of Python in a session of its own, forked with torch loaded, which takes an interpreter seconds."""

    def __init__(self, words: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._process: Any = forkserver().Process(target=_run, args=(list(words), str(log), dict(environment)))
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("python", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended in between, and its parent took it away
                os.kill(self.pid, sig)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(words: list[str], log: str, environment: dict[str, str]) -> None:
    """Do as `python *words` does."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    inherited = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    run_words(words, str(ROOT), inherited | environment)


def start(
    flags: Sequence[str], log: Path, torchrun: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Launched:
    """Start pretrain_gpt.py on the CPU, alone or with the flags of torchrun; its output goes to `log`."""
    program = ["pretrain_gpt.py", "--device", "cpu", *flags]
    return start_python(program, log) if not torchrun else start_torchrun([*torchrun, *program], log, environment)


def start_python(words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Launched:
    """Start a script with its own flags, as `python *words` would in the root of the repository."""
    return _Forked(words, log, environment or {})


def start_torchrun(words: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Launched:
    """Start torchrun, whose workers are interpreters of their own.

    Args:
        words: its flags, and the program with its own.
        environment: further variables; those of `warm_python` make forks of the workers.
    """
    return start_python(["-m", "torch.distributed.run", *words], log, environment)


def finish(process: Launched, log: Path, seconds: float = 300.0, *, code: int = 0) -> None:
    """Wait for a run that must succeed, or end with another exit code."""
    try:
        found = process.wait(seconds)
    finally:
        end_all(process)
    assert found == code, f"exit code {found}:\n{log.read_text(errors='replace')[-5000:]}"


def end_all(process: Launched) -> None:
    """Kill whatever is left of a run, torchrun's workers included, at once and without warning."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def wait_until(reached: Callable[[], Any], log: Path, *processes: Launched) -> None:
    """Wait until something is reached by processes none of which may end before."""
    deadline = time.monotonic() + 300.0
    while not reached():
        said = log.read_text(errors="replace")[-5000:] if log.exists() else ""
        assert all(process.poll() is None for process in processes), f"it ended early:\n{said}"
        assert time.monotonic() < deadline, f"it does not get on:\n{said}"
        time.sleep(0.02)


def rank_processes(process: Launched) -> dict[int, psutil.Process]:
    """torchrun's workers by their rank; while it starts them, some may be missing."""
    ranks = {}
    for worker in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):
            ranks[int(worker.environ().get("RANK", "-1"))] = worker
    ranks.pop(-1, None)
    return ranks


def reproducible_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file without times, rates and memory. Its floats read back to the same doubles."""
    return [{name: value for name, value in row.items() if name not in MEASURED_FIELDS} for row in read_rows(path)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
