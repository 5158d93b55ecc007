"""Prints: nothing else in the package does (`tests/unit/test_terminal.py`), because a text may contain names or
contents of other origin, with escape sequences, which a terminal would obey.

`survive_lost_output` lets a training go on when its output is not read any more: the reading program has ended, as
`head` does; the terminal is closed; the disk that the log lies on is full.
"""

import errno
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from megatron_ext.durable import FULL

_EACH_TERMINAL, _EACH_FILE = 1.0, 30.0
"""Seconds between two signs of progress, in a terminal and elsewhere."""

BOLD, RED, YELLOW, PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[0m"
_MARKED = {"warning:": YELLOW, "error:": RED}
_BAR = 24

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


def in_colour(stream: TextIO | None = None) -> bool:
    """Return whether a stream, by default the standard output, shows colours: it is a terminal that can, and NO_COLOR
    (https://no-color.org) is not set."""
    asked = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return asked and (stream or sys.stdout).isatty()


def columns() -> int:
    """Return the columns of the terminal, or of $COLUMNS; 100 where there is neither."""
    return _size()[0]


def lines() -> int:
    """Return the lines of the terminal, or $LINES; 24 where there is neither."""
    return _size()[1]


def _size() -> tuple[int, int]:
    from shutil import get_terminal_size  # --help does not wait for it

    return get_terminal_size((100, 24))


def heading(text: str) -> None:
    """Print a line on the standard output, in bold where it shows colours."""
    bold = in_colour()
    say(f"{BOLD}{printable(text)}{PLAIN}" if bold else text, colours=(BOLD, PLAIN) if bold else ())


def bar(share: float) -> str:
    """Return a bar of which this share, from 0 to 1, is filled."""
    filled = round(_BAR * min(1.0, max(0.0, share)))
    return f"[{'#' * filled}{'-' * (_BAR - filled)}]"


def status(text: str) -> None:
    """Show a text in the last line of a terminal until the next text takes its place; elsewhere nothing is written."""
    if sys.stdout.isatty():
        sys.stdout.write(f"\r\x1b[K{printable(text)}\r")  # what comes from elsewhere begins at the left, too
        sys.stdout.flush()
        _Status.shown = True


def tracked[Item](what: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yield the items of long work, and show how many are done and the time that remains by the pace so far: with a bar
    in the last line of a terminal, elsewhere as lines on the standard error output, where it takes longer than half a
    minute.

    Args:
        what: the work on them ("writing weights").
    """
    terminal = sys.stdout.isatty()
    begun = shown = time.monotonic()
    for done, item in enumerate(items):
        now = time.monotonic()
        if done and now - shown >= (_EACH_TERMINAL if terminal else _EACH_FILE):
            left = (now - begun) / done * (len(items) - done)
            told = f"{done:,} of {len(items):,}, {remaining(left)} left"
            if terminal:
                status(f"{what} {bar(done / len(items))} {told}")
            else:
                note(f"{what}: {told}")
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
    """Holds whether the last line of the terminal is one of `status`."""

    shown = False


def note(text: str) -> None:
    """Print a line on the standard error output, in one piece, so that lines of several processes do not mix. The word
    `warning:` or `error:` that it begins with is in colour where a terminal shows colours."""
    first, space, rest = printable(text).partition(" ")
    if first in _MARKED and in_colour(sys.stderr):
        first = f"{_MARKED[first]}{first}{PLAIN}"
    _write(sys.stderr, f"{first}{space}{rest}\n")


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
