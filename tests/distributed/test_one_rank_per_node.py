"""Which ranks read or write for all ranks of their node, and what every rank then knows or raises: four ranks as two
nodes of two, which have folders of their own where a test says so."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.data.one_rank_per_node import one_rank_of_a_node_first, read_once_per_node
from megatron_ext.errors import ConfigurationError, DataError, StorageError
from megatron_ext.forkserver.ranks import run_ranks

ERRORS = [
    DataError("damaged"),
    StorageError("the store is away"),
    ConfigurationError("does not exist"),
    OSError(5, "Input/output error"),
]


def _outcome(function: Callable[[], Any]) -> Any:
    """Return what the function returns, or the kind and text of what it raises."""
    try:
        return function()
    except Exception as error:
        return type(error).__name__, str(error)


def _as_two_nodes(folder: str) -> dict[str, Any]:
    """On each of four ranks: what it is told in each situation, and whether it read or built by itself."""
    torch.distributed.init_process_group()
    rank = torch.distributed.get_rank()
    node, place = divmod(rank, 2)
    done: list[str] = []

    def reading(found: dict[str, str], fails: Exception | None = None) -> Callable[[], dict[str, str]]:
        def read() -> dict[str, str]:
            done.append("read")
            if fails is not None:
                raise fails
            return found

        return read

    def building(into: Path, fails: Exception | None = None) -> Callable[[], list[str]]:
        """Find what is there, and add a file, in the way of an index that is written where it is not found."""

        def build() -> list[str]:
            done.append("built")
            if fails is not None:
                raise fails
            there = sorted(path.name for path in into.iterdir() if not path.name.startswith("."))
            if not there:
                (into / "index").touch()
            return there

        return build

    results: dict[str, Any] = {}

    def note(name: str, function: Callable[[], Any]) -> None:
        done.clear()
        results[name] = (_outcome(function), list(done))
        torch.distributed.barrier()

    os.environ["LOCAL_RANK"] = str(place)
    note("read once on each node", lambda: read_once_per_node(reading({"a.idx": "1", "b.idx": "2"})))
    note("another file on node 1", lambda: read_once_per_node(reading({"a.idx": "1", "b.idx": f"of node {node}"})))
    for error in ERRORS:
        for failing in range(2):
            fails = error if node == failing else None
            kind = type(error).__name__
            note(f"{kind} on node {failing}", lambda fails=fails: read_once_per_node(reading({"a.idx": "1"}, fails)))
    os.environ["LOCAL_RANK"] = str(place + 1)
    note("rank 0 is not the first of its node", lambda: read_once_per_node(reading({"a.idx": f"by {rank}"})))
    os.environ["LOCAL_RANK"] = str(place)

    seen_by_all, own = Path(folder) / "new" / "cache", Path(folder) / f"node{node}" / "cache"
    note("one folder", lambda: one_rank_of_a_node_first(seen_by_all, building(seen_by_all)))
    results["left in it"] = sorted(os.listdir(seen_by_all))
    own.mkdir(parents=True, exist_ok=True)
    torch.distributed.barrier()
    note("a folder on each node", lambda: one_rank_of_a_node_first(own, building(own)))
    for error in ERRORS[:3]:
        kind = type(error).__name__
        note(f"{kind} of the first", lambda error=error: one_rank_of_a_node_first(seen_by_all, building(own, error)))
    results["left after errors"] = sorted(os.listdir(seen_by_all))
    no_folder = Path(folder) / "file" / "cache"
    note("no room for a mark", lambda: one_rank_of_a_node_first(no_folder, building(own)))
    torch.distributed.destroy_process_group()
    return results


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("nodes")
    (folder / "file").touch()
    return run_ranks(4, _as_two_nodes, str(folder))


def test_the_first_rank_of_each_node_reads_and_all_know_it(found: list[dict[str, Any]]) -> None:
    told = [one["read once on each node"] for one in found]
    assert [result for result, _ in told] == [{"a.idx": "1", "b.idx": "2"}] * 4
    assert [done for _, done in told] == [["read"], [], ["read"], []]


def test_rank_0_reads_also_where_it_is_not_the_first_of_its_node(found: list[dict[str, Any]]) -> None:
    told = [one["rank 0 is not the first of its node"] for one in found]
    assert told == [({"a.idx": "by 0"}, ["read"]), *[({"a.idx": "by 0"}, [])] * 3]


def test_another_file_on_a_node_is_an_error_of_all(found: list[dict[str, Any]]) -> None:
    told = {one["another file on node 1"][0] for one in found}
    assert told == {
        (
            "DataError",
            f"b.idx is another file on {socket.gethostname()}, which rank 2 is on, than on the node of rank 0: their "
            "ranks would train on other samples. Copy the same files to every node, or keep them where all nodes see "
            "them",
        )
    }


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_one_rank_cannot_read_is_raised_by_all(node: int, error: Exception, found: list[dict[str, Any]]) -> None:
    kind = type(error).__name__
    assert [one[f"{kind} on node {node}"][0] for one in found] == [(kind, str(error))] * 4


def test_rank_0_writes_the_index_and_the_others_find_it(found: list[dict[str, Any]]) -> None:
    assert [one["one folder"] for one in found] == [([], ["built"]), *[(["index"], ["built"])] * 3]
    assert found[0]["left in it"] == ["index"], "no mark is left"


def test_each_node_with_a_folder_of_its_own_writes_the_index_once(found: list[dict[str, Any]]) -> None:
    told = [one["a folder on each node"] for one in found]
    assert told == [([], ["built"]), (["index"], ["built"])] * 2


@pytest.mark.parametrize("error", ERRORS[:3], ids=lambda error: type(error).__name__)
def test_an_index_that_cannot_be_written_is_an_error_of_all(error: Exception, found: list[dict[str, Any]]) -> None:
    """Nobody waits, nobody builds after it, and the mark is taken away."""
    told = [one[f"{type(error).__name__} of the first"] for one in found]
    assert told == [((type(error).__name__, str(error)), built) for built in (["built"], [], [], [])]
    assert found[0]["left after errors"] == ["index"]


def test_a_folder_without_room_for_a_mark_may_hold_all_that_is_needed(found: list[dict[str, Any]]) -> None:
    """Every node then goes as if its folder were its own; whether something has to be written, building says."""
    assert [one["no room for a mark"] for one in found] == [(["index"], ["built"])] * 4


def test_alone_a_process_reads_and_builds_itself(tmp_path: Path) -> None:
    assert read_once_per_node(lambda: {"a.idx": "1"}) == {"a.idx": "1"}
    assert one_rank_of_a_node_first(tmp_path / "none", lambda: 7) == 7
    assert not (tmp_path / "none").exists()
