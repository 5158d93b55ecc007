"""Which ranks read or write for all ranks of their node, and what every rank then knows or raises.

The ranks are threads with their own numbers, and collectives that wait for all of them, so that a rank that leaves one
out is found by the clock.
"""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.data import one_rank_per_node
from megatron_ext.data.one_rank_per_node import one_rank_of_a_node_first, read_once_per_node
from megatron_ext.errors import ConfigurationError, DataError, StorageError


class Ranks:
    """Runs a function on several ranks of two nodes, the first of which has the ranks below `on_first`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int, on_first: int):
        self.size, self.on_first = size, on_first
        self._own = threading.local()
        self._barrier = threading.Barrier(size, timeout=5)
        self._posted: list[Any] = [None] * size
        self._lock = threading.Lock()
        self.events: list[str] = []
        for name, value in {
            "is_initialized": lambda: True,
            "get_rank": lambda: self.rank,
            "get_world_size": lambda: size,
            "broadcast_object_list": self._broadcast,
            "all_gather_object": self._gather,
        }.items():
            monkeypatch.setattr(torch.distributed, name, value)
        monkeypatch.setattr(one_rank_per_node.environment, "local_rank", lambda: self.local_rank)
        monkeypatch.setattr(one_rank_per_node.environment, "rank", lambda: self.rank)
        monkeypatch.setattr(one_rank_per_node.socket, "gethostname", lambda: f"node{self.node}")
        environment = self

        class Environment(dict[str, str]):
            def get(self, name: str, default: Any = None) -> Any:
                return str(environment.local_rank) if name == "LOCAL_RANK" else super().get(name, default)

        monkeypatch.setattr(one_rank_per_node.os, "environ", Environment(os.environ))

    @property
    def rank(self) -> int:
        return self._own.rank

    @property
    def node(self) -> int:
        return int(self.rank >= self.on_first)

    @property
    def local_rank(self) -> int:
        return self.rank - self.on_first * self.node

    def note(self, text: str) -> None:
        with self._lock:
            self.events.append(text)

    def _exchanged(self, value: Any) -> list[Any]:
        self._posted[self.rank] = value
        self._barrier.wait()
        found = list(self._posted)
        if self._barrier.wait() == 0:
            self.note("all")
        self._barrier.wait()
        return found

    def _broadcast(self, values: list[Any], src: int) -> None:
        values[0] = self._exchanged(values[0])[src]

    def _gather(self, values: list[Any], own: Any) -> None:
        values[:] = self._exchanged(own)

    def run(self, function: Callable[[], Any]) -> list[Any]:
        """Return what each rank returned or raised."""
        found: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            self._own.rank = rank
            try:
                found[rank] = function()
            except Exception as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return found


def test_alone_a_process_reads_and_builds_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    assert read_once_per_node(lambda: {"a.idx": "1"}) == {"a.idx": "1"}
    assert one_rank_of_a_node_first(tmp_path / "none", lambda: 7) == 7
    assert not (tmp_path / "none").exists()


def test_the_first_rank_of_each_node_reads_and_all_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 5, on_first=3)

    def read() -> dict[str, str]:
        ranks.note(f"read by {ranks.rank}")
        return {"a.idx": "1", "b.idx": "2"}

    assert ranks.run(lambda: read_once_per_node(read)) == [{"a.idx": "1", "b.idx": "2"}] * 5
    assert sorted(event for event in ranks.events if event != "all") == ["read by 0", "read by 3"]


def test_rank_0_reads_also_where_it_is_not_the_first_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 3, on_first=3)
    monkeypatch.setattr(one_rank_per_node.environment, "local_rank", lambda: ranks.rank + 1)
    assert ranks.run(lambda: read_once_per_node(lambda: {"a.idx": f"by {ranks.rank}"})) == [{"a.idx": "by 0"}] * 3


def test_another_file_on_a_node_is_an_error_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, 4, on_first=2)
    found = ranks.run(lambda: read_once_per_node(lambda: {"a.idx": "1", "b.idx": f"of node {ranks.node}"}))
    assert {type(error) for error in found} == {DataError}
    assert {str(error) for error in found} == {
        "b.idx is another file on node1, which rank 2 is on, than on the node of rank 0: their ranks would train on "
        "other samples. Copy the same files to every node, or keep them where all nodes see them"
    }


ERRORS = [
    DataError("damaged"),
    StorageError("the store is away"),
    ConfigurationError("does not exist"),
    OSError(errno.EIO, "Input/output error"),
]


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_one_rank_cannot_read_is_raised_by_all(
    node: int, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch, 4, on_first=2)

    def read() -> dict[str, str]:
        if ranks.node == node:
            raise error
        return {"a.idx": "1"}

    assert ranks.run(lambda: read_once_per_node(read)) == [error] * 4


@pytest.mark.parametrize("shared", [True, False])
def test_who_writes_the_index_first(shared: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rank 0, and the first rank of a node with a folder of its own; then the others, who find what was written."""
    ranks = Ranks(monkeypatch, 4, on_first=2)
    exists = os.path.exists

    def seen(path: Any) -> bool:
        return exists(path) and (shared or ranks.node == 0)

    monkeypatch.setattr(one_rank_per_node.os.path, "exists", seen)

    def build() -> str:
        ranks.note(f"built by {ranks.rank}")
        return f"of {ranks.rank}"

    folder = tmp_path / "new" / "cache"
    assert ranks.run(lambda: one_rank_of_a_node_first(folder, build)) == ["of 0", "of 1", "of 2", "of 3"]
    first = {"built by 0"} if shared else {"built by 0", "built by 2"}
    after_all = len(ranks.events) - ranks.events[::-1].index("all")
    assert set(ranks.events[:after_all]) - {"all"} == first
    assert len(ranks.events[after_all:]) == 4 - len(first)
    assert list(folder.iterdir()) == [], "no mark is left"


@pytest.mark.parametrize("error", ERRORS[:3], ids=lambda error: type(error).__name__)
def test_an_index_that_cannot_be_written_is_an_error_of_all(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody waits, nobody builds after it, and the mark is taken away."""
    ranks = Ranks(monkeypatch, 3, on_first=3)

    def build() -> None:
        ranks.note(f"built by {ranks.rank}")
        raise error

    assert ranks.run(lambda: one_rank_of_a_node_first(tmp_path, build)) == [error] * 3
    assert [event for event in ranks.events if event != "all"] == ["built by 0"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_folder_without_room_for_a_mark_may_hold_all_that_is_needed(
    number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every node then goes as if its folder were its own; whether something has to be written, building says."""
    ranks = Ranks(monkeypatch, 2, on_first=1)

    def makedirs(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(one_rank_per_node.os, "makedirs", makedirs)
    assert ranks.run(lambda: one_rank_of_a_node_first(tmp_path / "none", lambda: ranks.rank)) == [0, 1]
