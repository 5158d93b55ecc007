"""Names of snapshots and of their files, and which of them stay. The first rank of a machine removes for all."""

from pathlib import Path

import pytest

from megatron_ext.checkpoint.native.checkpoint_folder import iteration_folder
from megatron_ext.plugins.snapshots import snapshot_folder

STEPS = (0, 1, 10, 200000, 10000000)
"""Numbers whose names begin alike, whose order as text is another one, and the first that needs eight digits."""


def snapshots(at: Path) -> Path:
    """Make a snapshot of each of STEPS, and what is none."""
    for step in STEPS:
        iteration_folder(at, step).mkdir(parents=True)
    for name in ("iter_3", "iter_0000003x", "xiter_0000003", ".iter_0000004.partial"):
        (at / name).mkdir()
    return at


def test_snapshots_are_listed_by_number(tmp_path: Path) -> None:
    assert snapshot_folder.iterations(snapshots(tmp_path)) == sorted(STEPS)
    assert snapshot_folder.iterations(tmp_path / "none") == []


def test_the_newest_two_stay_and_later_ones_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A faster rank of the machine may have begun the next one."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    snapshots(tmp_path)
    snapshot_folder.remove_old(tmp_path, 200000)
    snapshot_folder.remove_later(tmp_path, 10)
    snapshot_folder.remove_all(tmp_path)
    assert snapshot_folder.iterations(tmp_path) == sorted(STEPS), "the second rank of the machine removes nothing"
    monkeypatch.setenv("LOCAL_RANK", "0")
    snapshot_folder.remove_old(tmp_path, 200000)
    assert snapshot_folder.iterations(tmp_path) == [10, 200000, 10000000]
    snapshot_folder.remove_later(tmp_path, 200000)
    assert snapshot_folder.iterations(tmp_path) == [10, 200000]
    snapshot_folder.remove_old(tmp_path, 10)
    assert snapshot_folder.iterations(tmp_path) == [10, 200000]
    snapshot_folder.remove_all(tmp_path)
    assert not tmp_path.exists()


def test_a_ranks_own_file_comes_before_another_machines_copy(tmp_path: Path) -> None:
    there = iteration_folder(tmp_path, 10)
    there.mkdir()
    assert snapshot_folder.ranks_at(tmp_path, 10) == snapshot_folder.ranks_at(tmp_path, 1) == {}
    names = ("rank_00001", "rank_00010", "rank_00010.copy", "rank_00002.copy", "rank_100000")
    for name in (*names, "rank_1", "rank_00003.partial", "rank_00004.copy.partial", "xrank_00005"):
        (there / name).touch()
    found = {rank: path.name for rank, path in snapshot_folder.ranks_at(tmp_path, 10).items()}
    assert found == {1: "rank_00001", 2: "rank_00002.copy", 10: "rank_00010", 100000: "rank_100000"}
    assert {snapshot_folder.file_of(tmp_path, 10, rank, copy=rank == 2).name for rank in found} == set(found.values())
