"""What a command takes is that of everything that it has started."""

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from benchmarks import process_tree


def test_memory_is_that_of_all_generations_and_the_highest_of_all_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's ranks are children of its agent; a process that has ended since is left out."""
    looks = iter([[3, 40, None, 500], [3, 70, 600], [2, None]])

    def process(size: int | None) -> Any:
        def memory() -> Any:
            if size is None:
                raise psutil.NoSuchProcess(1)
            return SimpleNamespace(pss=size, rss=10_000)

        return SimpleNamespace(memory_full_info=memory)

    def children(recursive: bool = False) -> list[Any]:
        sizes = next(looks)
        return [process(size) for size in (sizes if recursive else sizes[:1])]

    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(children=children))
    ends = iter([False, False, False, True])
    ended: Any = SimpleNamespace(wait=lambda seconds: next(ends))
    peaks = [0]
    process_tree._watch(7, ended, peaks)
    assert peaks == [673]


def test_what_ends_between_two_looks_has_the_peak_that_the_kernel_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_tree, "_watch", lambda pid, ended, peaks: None)
    measured = process_tree.measure(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (measured.exit_code, sorted(measured.output.split())) == (3, ["err", "out"])
    assert measured.peak_bytes > 100_000, "of a shell, in bytes"
    monkeypatch.setattr(process_tree, "_watch", lambda pid, ended, peaks: peaks.__setitem__(0, 1 << 40))
    assert process_tree.measure(["true"]).peak_bytes == 1 << 40
