"""Tells a thread of a signal while the main thread waits in C++, where Python's own handlers have to wait too."""

import contextlib
import os
import signal


class WakeUp:
    """A pipe into which the interpreter writes the number of every signal that has a handler of Python's."""

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
        """End the wait of who polls the descriptor."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def stop(self) -> None:
        """Let the interpreter write where it wrote before."""
        if self._before is not None:
            with contextlib.suppress(ValueError):  # not on the main thread
                signal.set_wakeup_fd(self._before)

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self.descriptor)
        os.close(self._writer)


def _write_nowhere() -> None:
    """Let a forked helper (a data loader, a checkpoint writer) not pass its own signals off as its parent's."""
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)
