"""A person at a terminal, in a rank: what they type, and what they see."""

import os
import pty
import sys
import threading
from collections.abc import Callable, Sequence


def at_terminal(program: Callable[[], object], lines: Sequence[str] | None) -> str:
    """Run the program with a terminal for input and output; type each line after a "> ", then Ctrl-D (None: nothing is
    typed). Return what was on the screen."""
    master, slave = pty.openpty()
    screen = bytearray()

    def person() -> None:
        for line in [*(f"{line}\n".encode() for line in lines or ()), b"\x04"]:
            while not (screen == b"> " or screen.endswith(b"\n> ")):
                screen.extend(os.read(master, 1000))
            screen.extend(b"\0")  # what ended the last "> "
            os.write(master, line)

    typing = threading.Thread(target=person, daemon=True)
    if lines is not None:
        typing.start()
    before = sys.stdin, sys.stdout
    sys.stdin, sys.stdout = os.fdopen(os.dup(slave), encoding="utf-8"), os.fdopen(os.dup(slave), "w", encoding="utf-8")
    try:
        program()
    finally:
        sys.stdout.close()
        sys.stdin, sys.stdout = before
    if lines is not None:
        typing.join()
    os.write(slave, b"\nend")
    while not screen.endswith(b"\nend"):
        screen.extend(os.read(master, 1000))
    return screen.decode().replace("\0", "").replace("\r\n", "\n")
