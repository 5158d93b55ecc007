"""Prints: nothing else in the package does (`tests/unit/test_terminal.py`), because a text may contain names or
contents of other origin, with escape sequences, which a terminal would obey.

`survive_lost_output` lets a training go on when its output is not read any more: the reading program has ended, as
`head` does; the terminal is closed; the disk that the log lies on is full.
"""

import errno
import importlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from megatron_ext.durable import FULL

_EACH_TERMINAL, _EACH_FILE = 1.0, 30.0
"""Seconds between two signs of progress, in a terminal and elsewhere."""

# Spaces of other scripts than ours, and what joins or parts letters and emoji: they do nothing but to be read.
_READ = "\n\t\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\u200c\u200d"


def printable(text: str) -> str:
    """Return a text in which every character that is none to be read, but for line ends and tabs, is written out.

    An escape becomes `\\x1b`; a byte of a file's name that is not UTF-8 becomes `\\udcff`, which can be encoded.
    """
    if text.isprintable():
        return text
    return "".join(_written_out(character) for character in text)


def say(text: str = "", *, end: str = "\n", colours: Sequence[str] = ()) -> None:
    """Print a text on the standard output.

    Args:
        end: the text after it.
        colours: escape sequences that are left as they are; the text of others in it is `printable` already.
    """
    parts = re.split(f"({'|'.join(map(re.escape, colours))})", text) if colours else [text]
    # In two pieces: without a buffer, that a reader has left in the middle of one is seen at the next.
    _write(sys.stdout, "".join(part if part in colours else printable(part) for part in parts), end)


def is_watched() -> bool:
    """Return whether a person sees the output while it is written: in a terminal, or in a notebook."""
    return sys.stdout.isatty() or _notebook() is not None


def _notebook() -> Any:
    """Return IPython's `display` where its kernel runs this process for a notebook; None elsewhere."""
    ipython = sys.modules.get("IPython")
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        return None
    return importlib.import_module("IPython.display").display


def bar(done: float, width: int = 30) -> str:
    """Return a bar of text for a share from 0 to 1 of some work."""
    full = round(width * min(max(done, 0.0), 1.0))
    return "█" * full + "░" * (width - full)


def status(text: str, *, done: float | None = None) -> None:
    """Show a text until the next text takes its place: in the last line of a terminal, or in a place of its own in a
    notebook; elsewhere nothing is written.

    Args:
        done: share of the work that is done, which a notebook shows as a bar.
    """
    if (display := _notebook()) is not None:
        shown = text if done is None else f"{bar(done)} {text}"
        if _Status.place is None and text:
            _Status.place = display({"text/plain": printable(shown)}, raw=True, display_id=True)
        elif _Status.place is not None:
            _Status.place.update({"text/plain": printable(shown)}, raw=True)
        if not text or (done is not None and done >= 1.0):
            _Status.place = None
    elif sys.stdout.isatty():
        sys.stdout.write(f"\r\x1b[K{printable(text)}\r")  # what comes from elsewhere begins at the left, too
        sys.stdout.flush()
        _Status.shown = True


def tracked[Item](what: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items of long work, and show how many are done and the time that remains by the pace so far: in the
    last line of a terminal, by a bar in a notebook, elsewhere as lines on the standard error output, where it takes
    longer than half a minute.

    Args:
        what: the work on them ("writing weights").
    """
    watched = is_watched()
    begun = shown = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done and now - shown >= (_EACH_TERMINAL if watched else _EACH_FILE):
            left = (now - begun) / done * (len(items) - done)
            text = f"{what}: {done:,} of {len(items):,}, {remaining(left)} left"
            if watched:
                status(text, done=done / len(items))
            else:
                note(text)
            shown = now
        yield item
    status("")


def remaining(seconds: float) -> str:
    """Return a time as people write it: 0:43, 12:05, 3:20:00, or 2 days 3:20:00."""
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{whole:02}" if hours or days else f"{minutes}:{whole:02}"
    return f"{days} day{'s' * (days > 1)} {clock}" if days else clock


class _Status:
    """Holds whether the last line of the terminal is one of `status`, and its place in a notebook."""

    shown = False
    place: Any = None


def note(text: str) -> None:
    """Print a line on the standard error output, in one piece, so that lines of several processes do not mix."""
    _write(sys.stderr, f"{printable(text)}\n")


def warn(text: str) -> None:
    """Print a warning on the standard error output."""
    note(f"warning: {text}")


def _write(stream: TextIO, *pieces: str) -> None:
    if _Status.shown:
        _Status.shown = False
        sys.stdout.write("\x1b[K")
        sys.stdout.flush()
    for piece in pieces:
        stream.write(piece)
    stream.flush()


def _written_out(character: str) -> str:
    if character.isprintable() or character in _READ:
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


_CLOSED = (errno.EPIPE, errno.EIO)
"""Errors of a pipe or a terminal that is not read any more."""


def survive_lost_output() -> None:
    """Let the process go on when its output can go nowhere.

    Text for a closed pipe or terminal is dropped from then on; text that does not fit on a full disk is dropped until
    there is room again. The exit code stays the program's own.
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
        """Write out buffered text, or drop it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Remember why a write has failed; raise an error that is not about lost output."""
        if error.errno in FULL:
            return
        if error.errno not in _CLOSED:
            raise error
        # Text that the stream still holds goes to it, too, when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
