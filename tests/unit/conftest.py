"""What several files of unit tests ask for by name."""

from pathlib import Path

import pytest

from tests.support.requests import Requests


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Requests:
    """What the stand-ins of a test note; the files that lines name are in the current folder."""
    monkeypatch.chdir(tmp_path)
    return Requests(monkeypatch)
