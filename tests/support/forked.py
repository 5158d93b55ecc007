"""A function in a process of its own, forked from that of the tests: what it prints, and how it ends."""

import gc
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Forked:
    """A forked process, which holds the only other end of its output; so do the processes that it starts."""

    def __init__(self, pid: int, output: int):
        self.pid = pid
        self._output, self._said, self._code = output, b"", None

    def ended(self, seconds: float = 60.0) -> tuple[int, str]:
        """Wait for its end, and for that of all that it has started; return its exit code (negative: the signal), and
        what they wrote."""
        assert self._read_until(time.monotonic() + seconds, lambda: False), f"it still runs: {self._said.decode()}"
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code, self._said.decode()

    def says(self, text: str, seconds: float = 60.0) -> None:
        """Wait until it has written a text."""
        deadline = time.monotonic() + seconds
        self._read_until(deadline, lambda: text.encode() in self._said)
        assert text in self._said.decode()

    @property
    def said(self) -> str:
        """What has been read of its output."""
        return self._said.decode()

    def lives_for(self, seconds: float) -> bool:
        """Return whether it, or one that it has started, is still there after so long."""
        return not self._read_until(time.monotonic() + seconds, lambda: False)

    def send_signal(self, number: int) -> None:
        if self._code is None:
            os.kill(self.pid, number)

    def _read_until(self, deadline: float, reached: Callable[[], bool]) -> bool:
        """Return whether all has been read that will ever be written."""
        while not reached():
            if not select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            part = os.read(self._output, 1 << 16)
            if not part:
                return True
            self._said += part
        return False

    def close(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._output)


def fork(function: Callable[..., Any], *arguments: Any) -> Forked:
    """Begin `function(*arguments)`; the process ends with 0 after it, and with 99 and a traceback if it raises."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return Forked(pid, reader)
    code = 99
    gc.freeze()  # objects of the tests' process are collected there; torch's do not survive it without their threads
    try:
        os.close(reader)
        for stream in (1, 2):
            os.dup2(writer, stream)
        os.close(writer)
        sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@contextmanager
def forks() -> Iterator[Callable[..., Forked]]:
    """`fork`, with an end for what is left of it."""
    begun: list[Forked] = []

    def begin(function: Callable[..., Any], *arguments: Any) -> Forked:
        begun.append(fork(function, *arguments))
        return begun[-1]

    try:
        yield begin
    finally:
        for process in begun:
            process.close()
