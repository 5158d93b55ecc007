"""What several files of unit tests ask for by name."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.crashes import Disk
from tests.support.requests import Requests


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Requests:
    """What the stand-ins of a test note; the files that lines name are in the current folder."""
    monkeypatch.chdir(tmp_path)
    return Requests(monkeypatch)


@pytest.fixture
def watched_disk() -> Iterator[Callable[[Path], Disk]]:
    """Watches a folder, as a disk that loses what nobody waits for; `end` of what it returns ends that."""
    with pytest.MonkeyPatch.context() as patch:
        yield lambda folder: Disk(folder, patch)
