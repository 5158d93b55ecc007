"""What is read, copied, checked and merged in blocks of a megabyte is the same in blocks of a few bytes.

The files of other tests fit into one block, so that a block too many, or a place counted from the wrong end, would
not show.
"""

import os
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.checkpoint import copying
from megatron_ext.checkpoint.copying import ComputedBytes, FilePart, FileRange, Files, Literal, SkippedBytes, Zeros
from megatron_ext.checkpoint.local import rank_file
from megatron_ext.checkpoint.native import manifest
from megatron_ext.data import checksums as data_checksums
from megatron_ext.data import indexed, inspect, integrity, mask
from megatron_ext.data.indexed import HEADER, IndexedWriter
from megatron_ext.data.prepare import merge
from megatron_ext.errors import DataError

RANDOM = np.random.default_rng(0)


def _content(size: int) -> bytes:
    return RANDOM.integers(0, 256, size, np.uint8).tobytes()


@pytest.mark.parametrize("block", [1000, 1024, 1])
@pytest.mark.parametrize("threads", [1, 4])
def test_files_are_gathered_and_scattered(
    block: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "BLOCK", block)
    monkeypatch.setattr(copying, "_THREADS", threads)
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


def test_a_file_that_ends_too_early_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "BLOCK", 1000)
    (tmp_path / "short").write_bytes(bytes(2500))
    with pytest.raises(EOFError, match=r"short ends at 2500, 500 bytes too early"):
        copying.scatter(tmp_path / "short", [SkippedBytes(3000)], checksum=True)


def test_checksums_of_a_checkpoints_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "_CHUNK", 1000)
    for size in (0, 1, 999, 1000, 1001, 2000, 2500):
        content = _content(size)
        (tmp_path / "file").write_bytes(content)
        assert manifest.checksum(tmp_path / "file") == f"{zlib.crc32(content):08x}"


def test_a_snapshots_checksum_covers_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_file, "_CHUNK", 1000)
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


def _pair(prefix: Path, lengths: list[int], first: int = 0) -> str:
    """Tokens of ascending numbers, each of which counts where it is even."""
    tokens = np.arange(first, first + sum(lengths), dtype=np.uint16)
    with IndexedWriter(prefix, np.uint16, packed_to=8) as writer:
        flags = np.where(tokens % 2 == 0, mask.COUNTS, 0).astype(np.uint8)
        writer.add_tokens(tokens.tobytes(), lengths, flags)
    return str(prefix)


LENGTHS = [5, 0, 17, 1, 0, 0, 64, 3, 2, 2, 9, 0]


def test_data_checksums_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = _pair(tmp_path / "x", LENGTHS * 30)
    expected = data_checksums.checksums([prefix], 1024)
    whole = Path(f"{prefix}.bin").read_bytes()
    blocks = [f"{zlib.crc32(whole[first : first + 1024]):08x}" for first in range(0, len(whole), 1024)]
    assert expected[prefix]["crc32"][".bin"] == blocks
    monkeypatch.setattr(data_checksums, "_PIECE", 100)
    assert data_checksums.checksums([prefix], 1024) == expected


@pytest.mark.parametrize("documents", [1, 3, 4])
def test_an_index_is_written_some_documents_at_a_time(
    documents: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pair(tmp_path / "whole", LENGTHS)
    monkeypatch.setattr(indexed, "_DOCUMENTS_AT_ONCE", documents)
    _pair(tmp_path / "parts", LENGTHS)
    assert (tmp_path / "parts.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()


@pytest.mark.parametrize("block", [1, 3, 4])
def test_merged_and_summarized(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = [_pair(tmp_path / "a", LENGTHS), _pair(tmp_path / "b", LENGTHS[::-1], 300)]
    merge.merge_indexed_files(prefixes, str(tmp_path / "whole"))
    summary = inspect.summarize(str(tmp_path / "whole"))
    monkeypatch.setattr(merge, "_BLOCK", block)
    monkeypatch.setattr(mask, "_BLOCK", block)
    monkeypatch.setattr(inspect, "_BLOCK", block)
    merge.merge_indexed_files(prefixes, str(tmp_path / "small"))
    for suffix in (".bin", ".idx", ".mask"):
        assert (tmp_path / f"small{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes(), suffix
    assert inspect.summarize(str(tmp_path / "small")) == summary
    assert (summary.documents, summary.empty_documents, summary.tokens) == (24, 8, 206)
    assert mask.Mask(str(tmp_path / "small"), 206).check() == 2 * 52


@pytest.mark.parametrize("block", [1, 3, 8, 1000])
def test_every_entry_of_an_index_is_looked_at(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integrity, "_BLOCK", block)
    prefix = _pair(tmp_path / "x", LENGTHS)
    integrity.check_indexed_files(prefix)
    whole, sequences = Path(f"{prefix}.idx").read_bytes(), sum(length > 0 for length in LENGTHS)
    lengths, pointers, documents = HEADER.size, HEADER.size + 4 * sequences, HEADER.size + 12 * sequences
    places = [lengths + 4 * number for number in range(sequences)]
    places += [pointers + 8 * number for number in range(sequences)]
    # A document less or more in the middle still rises: the first and the last entry are known.
    places += [documents, documents + 8 * len(LENGTHS)]
    for place in places:
        Path(f"{prefix}.idx").write_bytes(whole[:place] + bytes([whole[place] + 1]) + whole[place + 1 :])
        with pytest.raises(DataError, match=r"the file is altered|belongs to other data"):
            integrity.check_indexed_files(prefix)
