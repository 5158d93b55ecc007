"""The real program in real processes, as a user starts it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_ext.telemetry.jsonl import read_rows
from megatron_ext.telemetry.metrics import MEASURED_FIELDS

ROOT = Path(__file__).resolve().parents[2]
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def start(flags: Sequence[str], log: Path, torchrun: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start pretrain_gpt.py on the CPU, alone or with the flags of torchrun; its output goes to `log`."""
    launcher = ["-m", "torch.distributed.run", *torchrun] if torchrun else []
    environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *launcher, "pretrain_gpt.py", "--device", "cpu", *flags],
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[bytes], log: Path, seconds: float = 300.0) -> None:
    """Wait for a run that must succeed."""
    try:
        code = process.wait(seconds)
    finally:
        end_all(process)
    assert code == 0, f"exit code {code}:\n{log.read_text(errors='replace')[-5000:]}"


def end_all(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of a run, torchrun's workers included, at once and without warning."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def rank_processes(process: subprocess.Popen[bytes]) -> dict[int, psutil.Process]:
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
