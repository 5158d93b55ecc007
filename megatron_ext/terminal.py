"""Prints what others have named: a file's name may hold escape sequences, which a terminal would obey."""

import sys


def printable(text: str) -> str:
    """Return a text in which every character that is none to be read, but for line ends and tabs, is written out.

    An escape becomes `\\x1b`; a byte of a file's name that is not UTF-8 becomes `\\udcff`, which can be encoded.
    """
    if text.isprintable():
        return text
    return "".join(_written_out(character) for character in text)


def warn(text: str) -> None:
    """Print a warning on the standard error output."""
    print(printable(f"warning: {text}"), file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Print a line on the standard output."""
    print(printable(text), flush=True)


def _written_out(character: str) -> str:
    if character.isprintable() or character in "\n\t":
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
