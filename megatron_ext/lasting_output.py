"""Lets a training go on when whoever reads its output leaves, as `head` does, or a terminal that is closed."""

import os
import sys
from typing import Any


def survive_closed_pipes() -> None:
    """Let the process go on in silence when whoever reads its output leaves, as `head` does.

    What is printed after that goes nowhere, and the exit code stays the program's own.
    """
    sys.stdout, sys.stderr = _Lasting(sys.stdout), _Lasting(sys.stderr)


class _Lasting:
    """A text stream that turns to /dev/null once its pipe is closed at the other end."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._leave()
            return len(text)

    def writelines(self, lines: Any) -> None:
        """Write every line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write out what is buffered, or drop it."""
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._leave()

    def _leave(self) -> None:
        # What the stream still holds goes there too, when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
