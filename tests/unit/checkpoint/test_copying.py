"""Shards from a rank's tensors to the bytes of files: copies and checksums, whose rows are written, how a save ends."""

import io
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.checkpoint import checksums, copying
from megatron_ext.checkpoint.copying import FilePart, Files, Literal, SkippedBytes, gather, scatter


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
