"""How much memory there is, by the machine and by the container that the process is in."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron_ext.device import cpu

GB = 10**9


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 GB, of which 10 are free; 8 GB to swap to, of which 3 are free."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GB, available=10 * GB))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=8 * GB, free=3 * GB))


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [
        (None, None, (64, 10)),
        ("max", 5, (64, 10)),
        (64, 5, (64, 10)),
        (100, 5, (64, 10)),
        (32, None, (32, 10)),
        (32, 30, (32, 2)),
        (32, 5, (32, 10)),  # the machine has no more, however little the container uses
        (32, 40, (32, 0)),
    ],
)
@pytest.mark.parametrize(
    "files",
    [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")],
    ids=["cgroup 2", "cgroup 1"],
)
def test_memory_is_the_lower_of_the_machines_and_the_containers(
    files: tuple[str, str], limit: Any, used: Any, expected: tuple[int, int], machine: None, tmp_path: Path
) -> None:
    (tmp_path / "memory").mkdir()
    for name, value in zip(files, (limit, used), strict=True):
        if value is not None:
            (tmp_path / name).write_text(f"{value * GB if isinstance(value, int) else value}\n")
    total, free = expected
    assert cpu.host_memory(tmp_path) == (total * GB, free * GB)
    assert cpu.host_swap() == 8 * GB
