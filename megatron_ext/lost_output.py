"""Lets a training go on when nobody takes its output any more.

Whoever read it has left, as `head` does; the terminal is closed; the disk that the log lies on is full.
"""

import errno
import os
import sys
from typing import Any

_CLOSED = (errno.EPIPE, errno.EIO)
"""A pipe or a terminal that nobody reads any more."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def survive_lost_output() -> None:
    """Let the process go on when its output can go nowhere.

    What is printed to a closed pipe or terminal goes nowhere from then on; what does not fit on a full disk is left
    out, until there is room again. The exit code stays the program's own.
    """
    sys.stdout, sys.stderr = _Lasting(sys.stdout), _Lasting(sys.stderr)


class _Lasting:
    """A text stream that turns to /dev/null once its other end is closed, and waits for room on a full disk."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def writelines(self, lines: Any) -> None:
        """Write every line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write out what is buffered, or drop it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Take note of why a write has failed; raise what is no reason to go on in silence."""
        if error.errno in _FULL:
            return
        if error.errno not in _CLOSED:
            raise error
        # What the stream still holds goes there too, when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
