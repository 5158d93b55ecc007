"""Parts of files that are gathered into one, and scattered again."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_ext.checkpoint import copying
from megatron_ext.checkpoint.copying import FilePart, Files, Literal, SkippedBytes, gather, scatter


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
