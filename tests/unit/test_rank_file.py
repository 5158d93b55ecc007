"""The file of one rank's snapshot: every bit comes back, and every damage is seen."""

import json
import os
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.local import agreement, folder, rank_file, writer
from megatron_ext.checkpoint.local.agreement import _of_another_course, _why_not
from megatron_ext.checkpoint.native import manifest
from megatron_ext.errors import DataError
from tests.support.small_models import small_config


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "a": torch.randn(3, 5, dtype=torch.float32),
        "scalar": torch.tensor(7.0, dtype=torch.float64),
        "half": torch.randn(33).to(torch.bfloat16),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "turned": torch.randn(4, 6).t().contiguous(),
        "none": torch.empty(0),
    }


def written(into: Path) -> Path:
    path = into / "rank_00000"
    size = rank_file.write(path, {"iteration": 4, "number": 0.1}, tensors())
    assert size == path.stat().st_size
    assert [entry.name for entry in into.iterdir()] == ["rank_00000"]
    return path


def test_every_bit_comes_back(tmp_path: Path) -> None:
    path = written(tmp_path)
    header = rank_file.read_header(path)
    assert header is not None
    assert (header["iteration"], header["number"]) == (4, 0.1)
    assert rank_file.is_intact(path)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    rank_file.restore(path, into)
    for name, tensor in tensors().items():
        assert torch.equal(into[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def test_every_flipped_or_missing_byte_is_seen(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = path.read_bytes()
    for place in [*range(0, len(content), 37), len(content) - 1]:
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        assert not rank_file.is_intact(path), place
        rank_file.read_header(path)  # may find nothing, and fails on nothing
    for length in (0, 3, 20, len(content) - 1):
        path.write_bytes(content[:length])
        assert not rank_file.is_intact(path)
        rank_file.read_header(path)
    path.write_bytes(content + b"x")
    assert not rank_file.is_intact(path)


def test_other_tensors_are_refused_before_any_is_copied(tmp_path: Path) -> None:
    path = written(tmp_path)
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()} | {"a": torch.zeros(5, 3)}
    with pytest.raises(DataError, match="of another run: 1 of its tensors differ, a the first"):
        rank_file.restore(path, into)
    assert not into["half"].any()


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        (7, "none of ours"),
        ({"a": 1}, "none of ours"),
        ([7], "none of ours"),
        ([["a", "float32", [2]]], "none of ours"),
        ([["a", "float32", [2], -64]], "none of ours"),
        ([["a", "float32", [2], 0.5]], "none of ours"),
        ([["a", "float32", [2], 1 << 70]], "shorter than its header says"),
        ([["a", "float32", [2], 60]], "shorter than its header says"),
        ([["a", "float32", [3], 0]], "of another run"),
    ],
)
def test_a_header_is_not_believed(listed: object, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rank_00000"
    header = json.dumps({"tensors": listed}).encode()
    content = b"MXSNAP01" + struct.pack("<Q", len(header)) + header + bytes(64)
    path.write_bytes(content + struct.pack("<I", zlib.crc32(content)))
    assert rank_file.is_intact(path)
    with pytest.raises(DataError, match=said):
        rank_file.restore(path, {"a": torch.zeros(2)})


@pytest.mark.parametrize(("more", "read"), [(0, True), (-1, False)])
def test_the_largest_header_is_read(more: int, read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path)
    (length,) = struct.unpack("<Q", path.read_bytes()[8:16])
    monkeypatch.setattr(rank_file, "_LARGEST_HEADER", length + more)
    assert (rank_file.read_header(path) is not None) == read


def test_a_pipe_in_the_place_of_a_snapshot_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "rank_00000"
    os.mkfifo(path)
    assert rank_file.read_header(path) is None
    assert not rank_file.is_intact(path)


def test_a_snapshot_is_of_a_folder_and_a_checkpoint(tmp_path: Path) -> None:
    """Where nobody knows of which, as with those of earlier versions, it is believed."""
    save = str(tmp_path)
    checkpoint = tmp_path / "iter_0000010"
    checkpoint.mkdir()
    manifest.write(checkpoint, {})
    header = {"checkpoint": 10, "contents": "a", "manifest": manifest.name_of(checkpoint)}
    assert _of_another_course(header, save, "a") == ""
    assert _of_another_course({"checkpoint": 10}, save, "a") == _of_another_course(header, save, None) == ""
    assert "before it was emptied" in _of_another_course(header, save, "b")
    manifest.write(checkpoint, {"x": {"bytes": 1, "crc32": "00000000"}})
    assert f"another checkpoint than {checkpoint}" in _of_another_course(header, save, "a")
    (checkpoint / manifest.MANIFEST).unlink()
    assert _of_another_course(header, save, "a") == "", "it has expired"


def test_a_snapshot_of_another_layout_or_course_is_not_used() -> None:
    header = {"layout": {"world_size": 4, "pipeline_model_parallel_size": 2}, "checkpoint": 10}
    same = dict(header["layout"])  # pyright: ignore[reportArgumentType]
    assert _why_not(header, same, 10) == ""
    assert _why_not(header, same, 12) == ""
    assert _why_not(header, {**same, "world_size": 2}, 10) == "it is of another layout (--world-size 4, now 2)"
    assert "follows on the checkpoint of iteration 10" in _why_not(header, same, 5)
    assert _why_not(None, same, 10) == _why_not({"layout": 3}, same, 10) == "it has a file that is not whole"


def test_a_ranks_own_file_comes_before_another_machines_copy(tmp_path: Path) -> None:
    for names, found in (
        (("rank_00001.copy",), {1: "rank_00001.copy"}),
        (("rank_00001", "rank_00001.partial"), {1: "rank_00001"}),
        (("rank_00000.copy",), {0: "rank_00000.copy", 1: "rank_00001"}),
    ):
        for name in names:
            (tmp_path / "iter_0000004").mkdir(exist_ok=True)
            (tmp_path / "iter_0000004" / name).touch()
        assert {rank: path.name for rank, path in folder.ranks_at(tmp_path, 4).items()} == found


def _writer(path: Path, **run: Any) -> Any:
    """A writer of snapshots into a folder, on rank 0 of a run made by hand."""
    made: Any = object.__new__(writer.SnapshotWriter)
    made.folder, made.problem, made._jump = path, None, 0
    made._contents, made._follows = "of this run", (0, None)
    made.run = SimpleNamespace(rank=0, device=SimpleNamespace(bind_thread=lambda: None), **run)
    return made


@pytest.mark.parametrize("fails", [False, True])
def test_older_snapshots_go_when_the_new_one_is_whole(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for iteration in (2, 4, 6):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
    made, there = _writer(tmp_path), []

    def write(path: Path, facts: Any, tensors: Any) -> int:
        there.extend(folder.iterations(tmp_path))
        if fails:
            raise OSError(28, "No space left on device")
        return 17

    monkeypatch.setattr(writer.rank_file, "write", write)
    monkeypatch.setattr(made, "_facts", lambda iteration, numbers: {})
    made._write(8, {}, {})
    assert there == [2, 4, 6, 8]
    assert folder.iterations(tmp_path) == ([2, 4, 6, 8] if fails else [6, 8])
    assert (made.problem is not None) == fails


def test_a_snapshot_follows_on_the_last_checkpoint_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after it are of another course of the run, which went on from an earlier one."""
    monkeypatch.setattr(writer, "saved_iterations", lambda save: [2, 4, 8])
    made = _writer(tmp_path, config=small_config(), data_record=None)
    assert [made._facts(iteration, {})["checkpoint"] for iteration in (1, 2, 5, 9)] == [0, 2, 4, 8]


def test_the_newest_snapshot_of_all_ranks_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 is not complete, and of 4 and 6 it is the later one."""
    here = {4: {0: ""}, 6: {0: ""}, 8: {0: ""}}
    there = {4: {1: ""}, 6: {1: ""}}

    def gather(told: list[Any], own: Any) -> None:
        told[:] = [own, there]

    monkeypatch.setattr(
        agreement.torch,
        "distributed",
        SimpleNamespace(get_world_size=lambda: 2, get_rank=lambda: 0, all_gather_object=gather),
    )
    monkeypatch.setattr(agreement, "folder_of", lambda config: tmp_path)
    monkeypatch.setattr(agreement, "_goes_on", lambda flags: True)
    monkeypatch.setattr(agreement, "told_by_the_first_rank", lambda make: make())
    monkeypatch.setattr(agreement, "_seen", lambda *_, checkpoint, contents: here)
    for name in ("_bring", "_damaged"):
        monkeypatch.setattr(agreement, name, lambda *_: None)
    monkeypatch.setattr(agreement, "_resume", lambda folder, iteration, config: iteration)
    search: Any = SimpleNamespace(candidates=())
    assert agreement.newest_snapshot(small_config(), search) == 6
