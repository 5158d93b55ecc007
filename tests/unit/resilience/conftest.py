"""What tests of the ends of processes ask for by name."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.forked import Forked, forks

_OF_LAUNCHERS = (
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
)


@pytest.fixture(autouse=True)
def _no_launcher_and_signals_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in _OF_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def begin() -> Iterator[Callable[..., Forked]]:
    """Begins a function in a process of its own, and ends what is left after the test."""
    with forks() as begin:
        yield begin


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes this process a rank of an attempt of torchrun's launch in a folder, and returns its error file."""

    def enter(folder: Path, restart: int, local_rank: int = 0) -> Path:
        place = folder / f"attempt_{restart}" / str(local_rank)
        place.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(place / "error.json"))
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restart))
        return place / "error.json"

    return enter
