"""Parts of files that are gathered into one, and scattered again; in blocks of a few bytes as in blocks of a megabyte.

The files of other tests fit into one block, so that a block too many, or a place counted from the wrong end, would
show with large files alone.
"""

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from megatron_ext.checkpoint.native import checkpoint_manifest
from megatron_ext.plugins.checkpoint_tools import copying
from megatron_ext.plugins.checkpoint_tools.copying import (
    ComputedBytes,
    FilePart,
    FileRange,
    Files,
    Literal,
    SkippedBytes,
    Zeros,
    gather,
    scatter,
)
from megatron_ext.plugins.snapshots import rank_file


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


RANDOM = np.random.default_rng(0)


def _content(size: int) -> bytes:
    return RANDOM.integers(0, 256, size, np.uint8).tobytes()


@pytest.fixture
def blocks_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let modules read and write so many bytes, or entries, at a time."""

    def set_to(size: int, *settings: tuple[ModuleType, str]) -> None:
        for module, name in settings:
            monkeypatch.setattr(module, name, size)

    return set_to


@pytest.mark.parametrize("block", [1000, 1024, 1])
@pytest.mark.parametrize("threads", [1, 4])
def test_files_are_gathered_and_scattered(
    block: int, threads: int, tmp_path: Path, blocks_of: Callable[..., None]
) -> None:
    blocks_of(block, (copying, "BLOCK"))
    blocks_of(threads, (copying, "_THREADS"))
    first, second, computed = _content(5000), _content(999), _content(1700)
    (tmp_path / "a").write_bytes(first)
    (tmp_path / "b").write_bytes(bytes(4000))

    def make(target: memoryview) -> None:
        target[:] = computed

    with Files(os.O_RDONLY) as files:
        parts: list[FilePart] = [
            Literal(3, b"abc"),
            FileRange(3001, files, tmp_path / "a", 7),
            ComputedBytes(1700, make),
            Zeros(1025),
            Literal(999, second),
            FileRange(1992, files, tmp_path / "a", 3008),
        ]
        size, crc = copying.gather(tmp_path / "whole", parts)
    whole = b"abc" + first[7:3008] + computed + bytes(1025) + second + first[3008:]
    assert (tmp_path / "whole").read_bytes() == whole
    assert (size, crc) == (len(whole), zlib.crc32(whole))

    taken: list[bytes] = []
    with Files(os.O_RDWR) as files:
        back: list[FilePart] = [
            SkippedBytes(3),
            FileRange(3001, files, tmp_path / "b", 11),
            ComputedBytes(1700, lambda source: taken.append(bytes(source))),
            SkippedBytes(1025 + 999),
            FileRange(900, files, tmp_path / "b", 3012),
            SkippedBytes(1092),
        ]
        assert copying.scatter(tmp_path / "whole", back, checksum=True) == (len(whole), zlib.crc32(whole))
        assert copying.scatter(tmp_path / "whole", back, checksum=False)[0] == len(whole)
    assert taken == [computed] * 2
    assert (tmp_path / "b").read_bytes() == bytes(11) + first[7:3008] + first[3008:3908] + bytes(4000 - 3912)


@pytest.mark.parametrize("lengths", [(0, 0), (1, 1), (1000, 1), (1, 1000), (0, 77), (65537, 4097)])
def test_checksums_of_parts_are_put_together(lengths: tuple[int, int]) -> None:
    first, second = map(_content, lengths)
    found = copying.combined_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
    assert found == zlib.crc32(first + second)


def test_a_file_that_ends_too_early_is_named(tmp_path: Path, blocks_of: Callable[..., None]) -> None:
    blocks_of(1000, (copying, "BLOCK"))
    (tmp_path / "short").write_bytes(bytes(2500))
    with pytest.raises(EOFError, match=r"short ends at 2500, 500 bytes too early"):
        copying.scatter(tmp_path / "short", [SkippedBytes(3000)], checksum=True)


def test_checksums_of_a_checkpoints_files(tmp_path: Path, blocks_of: Callable[..., None]) -> None:
    blocks_of(1000, (checkpoint_manifest, "_CHUNK"))
    for size in (0, 1, 999, 1000, 1001, 2000, 2500):
        content = _content(size)
        (tmp_path / "file").write_bytes(content)
        assert checkpoint_manifest.checksum(tmp_path / "file") == f"{zlib.crc32(content):08x}"


def test_a_snapshots_checksum_covers_every_block(tmp_path: Path, blocks_of: Callable[..., None]) -> None:
    blocks_of(1000, (rank_file, "_CHUNK"))
    tensors = {"a": torch.arange(700, dtype=torch.int32), "b": torch.ones(3, dtype=torch.bfloat16)}
    path = tmp_path / "rank_00000"
    size = rank_file.write(path, {"iteration": 1}, tensors)
    assert rank_file.is_intact(path)
    whole = path.read_bytes()
    assert (len(whole), whole[-4:]) == (size, zlib.crc32(whole[:-4]).to_bytes(4, "little"))
    for place in (0, 999, 1000, 1999, 2000, size - 5, size - 4, size - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert not rank_file.is_intact(path), place
    for other in (whole[:-1], whole + b"\0", whole[:1000], b""):
        path.write_bytes(other)
        assert not rank_file.is_intact(path)
