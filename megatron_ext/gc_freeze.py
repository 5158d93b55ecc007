"""Keeps Python's garbage collector away from objects that a program imports and keeps until its end.

torch and megatron-core make half a million objects while they are imported. The collector looks through them several
times on the way, and through all of them at each full collection later, in the middle of some training step.
"""

import atexit
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_from_the_collector() -> Iterator[None]:
    """Collect nothing inside the block, and exclude all objects that exist at its end from every later collection.

    When the process ends they are collected again: torch's libraries would report excluded objects as leaked. Where
    megatron-core is imported already, or the collector is off already, nothing is done.
    """
    if "megatron.core" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Collect nothing meanwhile; afterwards Python collects by itself if it did before."""
    collected_by_itself = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected_by_itself:
            gc.enable()


def end_at_once() -> None:
    """Have this process, and none that it forks, end with code 0 once all exit handlers registered after this are done.

    It is for a process that holds nothing but imports: at a normal exit, torch's libraries would report objects that
    `gc.freeze` excludes as leaked, on the user's terminal.
    """
    atexit.register(_end, os.getpid())


def _end(process: int) -> None:
    if os.getpid() == process:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
