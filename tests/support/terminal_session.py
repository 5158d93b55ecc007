"""A terminal in a rank, for input and output."""

import os
import pty
import sys
from collections.abc import Callable


def at_terminal(program: Callable[[], object]) -> str:
    """Run the program with a terminal for input and output; return what was on the screen."""
    master, slave = pty.openpty()
    screen = bytearray()
    before = sys.stdin, sys.stdout
    sys.stdin, sys.stdout = os.fdopen(os.dup(slave), encoding="utf-8"), os.fdopen(os.dup(slave), "w", encoding="utf-8")
    try:
        program()
    finally:
        sys.stdout.close()
        sys.stdin, sys.stdout = before
    os.write(slave, b"\nend")
    while not screen.endswith(b"\nend"):
        screen.extend(os.read(master, 1000))
    return screen.decode().replace("\r\n", "\n")
