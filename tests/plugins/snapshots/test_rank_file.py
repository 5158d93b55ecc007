"""The file of one rank's snapshot: every bit comes back, and every damage is seen."""

import json
import os
import struct
import zlib
from pathlib import Path

import pytest
import torch

from megatron_ext.errors import DataError
from megatron_ext.plugins.snapshots import rank_file


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "a": torch.randn(3, 5, dtype=torch.float32),
        "scalar": torch.tensor(7.0, dtype=torch.float64),
        "half": torch.randn(33).to(torch.bfloat16),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "turned": torch.randn(4, 6).t(),  # what is not in order in memory is written in order
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
    rank_file.write(path, {}, {})
    rank_file.restore(path, {})


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
    os.mkfifo(tmp_path / "rank_00000.partial")
    with pytest.raises(OSError, match="it is no file"):
        rank_file.write(path, {}, tensors())


def test_a_file_that_cannot_be_named_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank_00000").mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        rank_file.write(tmp_path / "rank_00000", {}, tensors())
    assert os.listdir(tmp_path) == ["rank_00000"]


def test_short_writes_are_gone_on_with() -> None:
    """A call may write less than it is given."""
    written = bytearray()

    def write(piece: memoryview) -> int:
        written.extend(piece[:3])
        return len(piece[:3])

    rank_file._write_all(write, b"0123456789")
    assert bytes(written) == b"0123456789"
