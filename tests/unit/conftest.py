"""What several files of unit tests ask for by name."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.crashes import Disk


@pytest.fixture(autouse=True)
def _own_streams() -> Iterator[None]:
    """The program puts its own streams in the place of Python's; the next test has its own."""
    streams = sys.stdout, sys.stderr
    yield
    sys.stdout, sys.stderr = streams


@pytest.fixture
def watched_disk() -> Iterator[Callable[[Path], Disk]]:
    """Watches a folder, as a disk that loses what nobody waits for; `end` of what it returns ends that."""
    with pytest.MonkeyPatch.context() as patch:
        yield lambda folder: Disk(folder, patch)
