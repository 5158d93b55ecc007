"""Measures the peak memory of a command and everything that it starts."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

_INTERVAL = 0.02  # seconds between two looks


@dataclass(frozen=True)
class Measured:
    """Reports what a command took. Processor seconds are those of all its threads and processes.

    `peak_bytes` is the highest sum over the process tree of PSS (Linux: memory that processes share is counted once,
    files that they map are counted, the page cache is not), looked at every 20 ms, or the peak RSS that the kernel
    keeps of the largest single process, whichever is more: the first misses what comes and goes between two looks.
    """

    exit_code: int
    output: str
    seconds: float
    processor_seconds: float
    peak_bytes: int


def measure(command: Sequence[str], cwd: str | None = None, environment: Mapping[str, str] | None = None) -> Measured:
    """Run a command to its end; `output` is what it wrote, errors included."""
    # A child begins with its parent's peak RSS, so a small process is between: it prints the peak of its children.
    reader, writer = os.pipe()
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", _BETWEEN, str(writer), *command],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(writer,),
        text=True,
        errors="replace",
    )
    os.close(writer)
    ended = threading.Event()
    peaks = [0]
    watcher = threading.Thread(target=_watch, args=(process.pid, ended, peaks))
    watcher.start()
    output, _ = process.communicate()
    seconds = time.perf_counter() - start
    ended.set()
    watcher.join()
    with open(reader) as usage:
        exit_code, processor_seconds, largest = usage.read().split()
    return Measured(int(exit_code), output, seconds, float(processor_seconds), max(peaks[0], int(largest)))


_BETWEEN = """
import os, resource, sys
pid = os.spawnvp(os.P_NOWAIT, sys.argv[2], sys.argv[2:])
status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
os.write(int(sys.argv[1]), f"{status} {used.ru_utime + used.ru_stime} {used.ru_maxrss * 1024}".encode())
"""


def _watch(pid: int, ended: threading.Event, peaks: list[int]) -> None:
    root = psutil.Process(pid)
    while not ended.wait(_INTERVAL):
        total = 0
        try:
            for process in root.children(recursive=True):
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue  # ended since
        except psutil.Error:
            return
        peaks[0] = max(peaks[0], total)
