"""A signal is seen by who polls, but not one that a forked helper got."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.resilience.signal_wakeup import WakeUp

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def wake_up() -> Iterator[WakeUp]:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    started = WakeUp()
    started.start()
    yield started
    started.stop()
    started.close()
    signal.signal(signal.SIGTERM, before)


def is_readable(wake_up: WakeUp) -> bool:
    return bool(select.select([wake_up.descriptor], [], [], 0.0)[0])


def test_a_signal_is_seen_once(wake_up: WakeUp) -> None:
    assert not is_readable(wake_up)
    os.kill(os.getpid(), signal.SIGTERM)
    assert is_readable(wake_up)
    assert wake_up.signals() == bytes([signal.SIGTERM])
    assert wake_up.signals() == b""


def test_wake_ends_a_wait_without_a_signal(wake_up: WakeUp) -> None:
    wake_up.wake()
    assert is_readable(wake_up)
    assert wake_up.signals() == b"\0"


FORKS = """
import os, signal
from megatron_ext.resilience.signal_wakeup import WakeUp

signal.signal(signal.SIGTERM, lambda *_: None)
started = WakeUp()
started.start()
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(started.signals())
"""


def test_a_signal_of_a_forked_helper_is_its_own() -> None:
    """In an interpreter of its own: where asyncio has been imported, as here, it does the same at a fork."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "b''\n"
