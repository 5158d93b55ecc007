"""Shards from a rank's tensors to the bytes of files: copies and checksums, whose rows are written, how a save ends."""

import errno
import io
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint import checksums, copying
from megatron_ext.checkpoint.copying import FilePart, Files, Literal, SkippedBytes, gather, scatter
from megatron_ext.checkpoint.native import save, saved_rows
from megatron_ext.errors import StorageError


class _File(io.BytesIO):
    """A file with a name, which notes when it is flushed."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.flushed = name, 0

    def flush(self) -> None:
        self.flushed += 1


def test_checksums_are_those_of_whole_files() -> None:
    """Of several tensors in each of two files that are written in turns; a checksum has eight digits."""
    watched = checksums.Checksums(SimpleNamespace(transform_save_stream=lambda item, stream: (stream, [])))
    files = [_File("/somewhere/__0_0.distcp"), _File("/somewhere/__0_1.distcp")]
    for piece in (b"first", b"second", b"", b"third"):
        for file in files:
            stream, _ = watched.transform_save_stream(None, file)
            stream.write(piece)
            stream.write(memoryview(file.name.encode()))
            stream.flush()
    expected = {}
    for file in files:
        path = f"{file.name}.x"
        expected[Path(file.name).name] = {"bytes": len(file.getvalue()), "crc32": _crc(file.getvalue())}
        assert file.flushed >= 4, path
    assert watched.files() == expected
    watched._written = {"/x/small": (3, 0xAB)}
    assert watched.files() == {"small": {"bytes": 3, "crc32": "000000ab"}}


def _crc(content: bytes) -> str:
    """Return the CRC-32 by its definition, a bit at a time."""
    value = 0xFFFFFFFF
    for byte in content:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
    return f"{value ^ 0xFFFFFFFF:08x}"


@pytest.mark.parametrize("before", [False, True])
def test_torchs_own_checksums_are_as_they_were_afterwards(before: bool) -> None:
    at_first = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(before)
        with checksums.without_checksums_of_torch():
            assert torch.serialization.get_crc32_options() is False
        assert torch.serialization.get_crc32_options() is before
    finally:
        torch.serialization.set_crc32_options(at_first)


@dataclass(frozen=True)
class _Taken(FilePart):
    into: list[tuple[int, bytes]]

    def scatter(self, start: int, source: memoryview) -> None:
        self.into.append((start, bytes(source)))


@pytest.mark.parametrize("checksum", [False, True])
def test_what_lies_next_to_skipped_bytes_is_read(checksum: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"skip-wanted-skip")
    found: list[tuple[int, bytes]] = []
    scatter(tmp_path / "file", [SkippedBytes(5), _Taken(6, found), SkippedBytes(5)], checksum=checksum)
    assert found == [(0, b"wanted")]


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"of before")
    with pytest.raises(FileExistsError):
        gather(tmp_path / "file", [Literal(3, b"new")])
    assert (tmp_path / "file").read_bytes() == b"of before"


def test_files_that_were_closed_are_opened_again(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    files = Files(os.O_RDONLY)
    for _ in range(2):
        with files:
            os.fstat(files[tmp_path / "file"])
    assert files._open == {}


def test_short_reads_and_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may take or give less than it is asked for."""
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(copying.os, "pwrite", lambda file, data, at: write(file, data[:3], at))
    monkeypatch.setattr(copying.os, "preadv", lambda file, into, at: read(file, [into[0][:3]], at))
    found: list[tuple[int, bytes]] = []
    gather(tmp_path / "file", [Literal(10, b"0123456789")])
    assert (tmp_path / "file").read_bytes() == b"0123456789"
    scatter(tmp_path / "file", [_Taken(10, found)], checksum=True)
    assert found == [(0, b"0123456789")]


@pytest.mark.parametrize("is_first", [False, True])
def test_a_rank_that_cannot_write_ends_the_save_of_all(is_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 hears of all answers, and tells the others what the first of them was."""
    answers: list[Any] = [{"a": {"bytes": 1}}, "the disk is full", "another reason"]

    def broadcast(told: list[Any], src: int) -> None:
        assert src == 0
        if is_first:
            assert told == ["the disk is full"]
        else:
            told[:] = ["the disk is full"]

    monkeypatch.setattr(save, "_gathered_by_first_rank", lambda own: answers if is_first else [])
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", broadcast)
    with pytest.raises(StorageError, match=r"to /save: the disk is full\. Earlier checkpoints"):
        save._gather_files("/save", {})
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda told, src: None)
    answers[1:] = [{"b": {"bytes": 2}}]
    assert save._gather_files("/save", {}) == ({"a": {"bytes": 1}, "b": {"bytes": 2}} if is_first else {})


def _save(folder: Path, log: list[Any], rank: int = 0) -> Any:
    made: Any = object.__new__(save.Save)
    made.run, made.folder, made.iteration = SimpleNamespace(rank=rank), folder, 7
    made._partial, made._files, made._thread = folder / ".iter_0000007.partial", {"own": {}}, None
    made._partial.mkdir(parents=True)
    made._copies, made._kept = SimpleNamespace(wait=lambda: log.append("copied")), save.Kept()
    made._request = SimpleNamespace(finalize_fns=[lambda: log.append("first"), lambda: log.append("second")])
    return made


@pytest.mark.parametrize("fails", [None, OSError(errno.EIO, "Input/output error"), StorageError("no room")])
def test_a_save_ends_on_all_ranks_or_leaves_nothing(
    fails: Exception | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log: list[Any] = []
    made = _save(tmp_path, log)
    made._thread = SimpleNamespace(join=lambda: log.append("written"))

    def publish(files: Any) -> None:
        log.append(files)
        if fails is not None:
            raise fails

    monkeypatch.setattr(torch.distributed, "barrier", lambda: log.append("all ranks"))
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda told, src: None)
    monkeypatch.setattr(save, "_gather_files", lambda folder, own: {"of all": own})
    monkeypatch.setattr(save, "_on_first_rank", lambda run, folder, action: action())
    monkeypatch.setattr(save, "remove_expired", lambda run, folder, newest: log.append(newest))
    monkeypatch.setattr(made, "_publish", publish)
    done = ["written", "all ranks", "first", "second", {"of all": {"own": {}}}]
    if fails is None:
        assert made.finish() == tmp_path / "iter_0000007"
        assert log == [*done, 7]
        return
    with pytest.raises(StorageError):
        made.finish()
    assert log == done
    assert not made._partial.exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_adds_what_is_no_shard(rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log: list[Any] = []
    made = _save(tmp_path, log, rank)
    monkeypatch.setattr(checksums, "watch", lambda request: SimpleNamespace(files=lambda: {"shard": {}}))
    monkeypatch.setattr(save, "write_shards", lambda request, buckets: log.append(buckets))
    monkeypatch.setattr(save, "_on_host", lambda request: "buckets")
    monkeypatch.setattr(made, "_write_companions", lambda: log.append("companions"))
    made._write(None)
    assert log == ["copied", "buckets", *(["companions"] if rank == 0 else [])]
    assert made._files == {"shard": {}}
    made._copies = SimpleNamespace(wait=lambda: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error", "/x")))
    made._write(None)
    assert made._files == "Input/output error: /x"
    made._copies = SimpleNamespace(wait=lambda: (_ for _ in ()).throw(ValueError("another")))
    made._write(None)
    assert made._files == "ValueError: another"


def _fails() -> None:
    raise OSError("no room")


def test_the_first_plan_serves_all_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that writes the metadata keeps it; the others have none, and keep what they have."""
    monkeypatch.setattr(
        save.TorchDistSaveShardedStrategy, "_get_save_and_finalize_callbacks", lambda self, *given: given
    )
    for metadata, kept in (("new", "new"), (None, "of before")):
        made: Any = object.__new__(save._PlannedOnce)
        made.cached_global_metadata, made.validated_cache_reuse = "of before", False
        planned = ("plan", metadata)
        writer = SimpleNamespace(finish=_fails)
        assert made._get_save_and_finalize_callbacks(writer, planned, "mcore") == (writer, planned, "mcore")
        writer.finish()
        assert str(made.failure) == "no room", "it is told when all ranks hear of it"
        assert (made.cached_global_metadata, made.validated_cache_reuse) == (kept, True)


@dataclass(frozen=True)
class _Part:
    """A tensor of the checkpoint, as far as rows are cut from it."""

    local_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: tuple[int, ...] = (5, 6)
    prepend_axis_num: int = 2
    key: str = ""
    data: Any = None
    dtype: Any = None
    axis_fragmentations: Any = "some"


def test_rows_of_stacked_experts_are_whole_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three experts of 4 by 5 in a layer, a rank has the second and third; none of the first is written."""
    parts = [_Part((4, 5), (3, expert, 8, 0)) for expert in range(3)]
    monkeypatch.setattr(saved_rows, "_parts", lambda weight: parts)
    rows = torch.arange(40.0).view(2, 4, 5)
    shard: Any = SimpleNamespace(first=1, stop=3, shape=(3, 4, 5), replica=7)
    found: Any = saved_rows.pieces(None, shard, rows, "name")  # pyright: ignore
    assert list(found) == ["0", "1"]
    for number, piece in enumerate(found.values()):
        assert torch.equal(piece.data, rows[number][None, None])
        assert (piece.global_offset, piece.local_shape) == ((3, number + 1, 8, 0), (1, 1, 4, 5))
        assert (piece.key, piece.replica_id, piece.prepend_axis_num) == ("name", (5, 7), 0)
    shard = SimpleNamespace(first=6, stop=10, shape=(12, 5), replica=0)
    found = saved_rows.pieces(None, shard, torch.arange(20.0).view(4, 5), "name")  # pyright: ignore
    assert [(piece.global_offset, tuple(piece.data.shape)) for piece in found.values()] == [
        ((3, 1, 10, 0), (1, 1, 2, 5)), ((3, 2, 8, 0), (1, 1, 2, 5))
    ]  # fmt: skip
