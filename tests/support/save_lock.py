"""Another job that holds the lock of a save folder."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.launched import ROOT, end_all

# Holds the lock, and so would a helper that it has forked, if that inherited it.
_HOLDER = """
import os, sys
from megatron_ext.checkpoint.native.lock import hold_until_exit
hold_until_exit(sys.argv[1])
if os.fork():
    print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(save: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that holds the lock of `save`; it ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(save)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        end_all(process)
