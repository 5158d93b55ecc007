"""A pair is written as Megatron writes it: whole, behind what was committed, or not at all."""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from megatron_ext.data import data_manifest as data_checksums
from megatron_ext.data import indexed, integrity, mask
from megatron_ext.data.indexed import HEADER, IndexedWriter, token_dtype
from megatron_ext.data.integrity import (
    check_indexed_files,
)
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.prepare import merge
from megatron_ext.plugins.prepare.commands import inspect_dataset

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10]]
LENGTHS = np.array([len(document) for document in DOCUMENTS])
TOKENS = [token for document in DOCUMENTS for token in document]


@pytest.fixture
def pair(tmp_path: Path) -> str:
    prefix = str(tmp_path / "data")
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens(np.array(TOKENS[:3], np.uint16).tobytes(), LENGTHS[:2])
        writer.add_tokens(np.array(TOKENS[3:], np.uint16).tobytes(), LENGTHS[2:])
    return prefix


def test_both_files_have_the_bytes_of_the_format(pair: str):
    assert Path(f"{pair}.bin").read_bytes() == struct.pack("<6H", *TOKENS)
    assert Path(f"{pair}.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 3, 5)
        + struct.pack("<3i", 3, 1, 2)
        + struct.pack("<3q", 0, 6, 8)
        + struct.pack("<5q", 0, 1, 1, 2, 3)
    )


def test_tokens_have_two_bytes_where_the_vocabulary_allows():
    assert token_dtype(65499) is np.uint16
    assert token_dtype(65500) is np.int32


def test_nothing_appears_before_it_is_whole(tmp_path: Path):
    writer = IndexedWriter(tmp_path / "data", np.int32)
    writer.add_tokens(np.array([1, 2], np.int32).tobytes(), np.array([2]))
    assert not {"data.bin", "data.idx"} & {path.name for path in tmp_path.iterdir()}
    writer.finish()
    assert {path.name for path in tmp_path.iterdir()} == {"data.bin", "data.idx"}


def test_a_failure_leaves_the_old_pair_and_nothing_else(pair: str):
    before = {path.name: path.read_bytes() for path in Path(pair).parent.iterdir()}

    def fail_midway() -> None:
        with IndexedWriter(pair, np.uint16) as writer:
            writer.add_tokens(b"\1\0", np.array([1]))
            raise KeyError

    with pytest.raises(KeyError):
        fail_midway()
    assert {path.name: path.read_bytes() for path in Path(pair).parent.iterdir()} == before


@pytest.mark.parametrize("suffix", [".bin", ".lengths", ".mask"])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_writer_goes_on_only_behind_all_that_was_written(tmp_path: Path, suffix: str, missing: int):
    writer = IndexedWriter(tmp_path / "data", np.uint16, packed_to=0)
    writer.add_tokens(bytes(10), [5, 0], np.ones(5, np.uint8))
    written = writer.commit()
    writer.close()
    path = tmp_path / f"data{suffix}.partial"
    os.truncate(path, path.stat().st_size - missing)
    assert IndexedWriter.holds(tmp_path / "data", written, 2) == (not missing)
    assert IndexedWriter.holds(tmp_path / "data", written) == (not missing or suffix == ".mask")
    path.unlink()
    assert IndexedWriter.holds(tmp_path / "data", written) == (suffix == ".mask")


def test_two_processes_do_not_write_one_pair(tmp_path: Path):
    first = IndexedWriter(tmp_path / "data", np.uint16)
    with pytest.raises(ConfigurationError, match=r"another process is writing .*data\.bin\.partial: wait for it"):
        IndexedWriter(tmp_path / "data", np.uint16)
    first.discard()
    IndexedWriter(tmp_path / "data", np.uint16).discard()


@pytest.mark.parametrize("committed", [0, 1, 2])
def test_a_mask_goes_on_behind_what_was_committed(tmp_path: Path, committed: int):
    """Its header is written once, also by a run that was killed before its first token."""
    blocks = [(b"\1\0\2\0\3\0", [2, 1], [2, 1, 2]), (b"\4\0", [1], [2])]
    writer = IndexedWriter(tmp_path / "data", np.uint16, packed_to=7)
    for tokens, lengths, flags in blocks[:committed]:
        writer.add_tokens(tokens, lengths, np.array(flags, np.uint8))
    done = writer.commit()
    writer.add_tokens(b"\x09\0", [1], np.array([1], np.uint8))  # lost
    writer.close()
    with IndexedWriter(tmp_path / "data", np.uint16, done, packed_to=7) as writer:
        for tokens, lengths, flags in blocks[committed:]:
            writer.add_tokens(tokens, lengths, np.array(flags, np.uint8))
    assert (tmp_path / "data.mask").read_bytes() == b"TOKMASK\0" + struct.pack("<II", 1, 7) + bytes([2, 1, 2, 2])
    assert (tmp_path / "data.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 4)
    check_indexed_files(str(tmp_path / "data"))


@pytest.fixture
def blocks_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let modules read and write so many bytes, or entries, at a time."""

    def set_to(size: int, *settings: tuple[ModuleType, str]) -> None:
        for module, name in settings:
            monkeypatch.setattr(module, name, size)

    return set_to


def _pair(prefix: Path, lengths: list[int], first: int = 0) -> str:
    """Tokens of ascending numbers, each of which counts where it is even."""
    tokens = np.arange(first, first + sum(lengths), dtype=np.uint16)
    with IndexedWriter(prefix, np.uint16, packed_to=8) as writer:
        flags = np.where(tokens % 2 == 0, mask.COUNTS, 0).astype(np.uint8)
        writer.add_tokens(tokens.tobytes(), lengths, flags)
    return str(prefix)


OF_PAIR = [5, 0, 17, 1, 0, 0, 64, 3, 2, 2, 9, 0]


def test_data_checksums_read_in_pieces(tmp_path: Path, blocks_of: Callable[..., None]) -> None:
    prefix = _pair(tmp_path / "x", OF_PAIR * 30)
    expected = data_checksums.checksums([prefix], 1024)
    whole = Path(f"{prefix}.bin").read_bytes()
    blocks = [f"{zlib.crc32(whole[first : first + 1024]):08x}" for first in range(0, len(whole), 1024)]
    assert expected[prefix]["crc32"][".bin"] == blocks
    blocks_of(100, (data_checksums, "_PIECE"))
    assert data_checksums.checksums([prefix], 1024) == expected


@pytest.mark.parametrize("documents", [1, 3, 4])
def test_an_index_is_written_some_documents_at_a_time(
    documents: int, tmp_path: Path, blocks_of: Callable[..., None]
) -> None:
    _pair(tmp_path / "whole", OF_PAIR)
    blocks_of(documents, (indexed, "_DOCUMENTS_AT_ONCE"))
    _pair(tmp_path / "parts", OF_PAIR)
    assert (tmp_path / "parts.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()


@pytest.mark.parametrize("block", [1, 3, 4])
def test_merged_and_summarized(block: int, tmp_path: Path, blocks_of: Callable[..., None]) -> None:
    prefixes = [_pair(tmp_path / "a", OF_PAIR), _pair(tmp_path / "b", OF_PAIR[::-1], 300)]
    merge.merge_indexed_files(prefixes, str(tmp_path / "whole"))
    summary = inspect_dataset.summarize(str(tmp_path / "whole"))
    blocks_of(block, (merge, "_BLOCK"), (mask, "_BLOCK"), (inspect_dataset, "_BLOCK"))
    merge.merge_indexed_files(prefixes, str(tmp_path / "small"))
    for suffix in (".bin", ".idx", ".mask"):
        assert (tmp_path / f"small{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes(), suffix
    assert inspect_dataset.summarize(str(tmp_path / "small")) == summary
    assert (summary.documents, summary.empty_documents, summary.tokens) == (24, 8, 206)
    assert mask.Mask(str(tmp_path / "small"), 206).check() == 2 * 52


@pytest.mark.parametrize("block", [1, 3, 8, 1000])
def test_every_entry_of_an_index_is_looked_at(block: int, tmp_path: Path, blocks_of: Callable[..., None]) -> None:
    blocks_of(block, (integrity, "_BLOCK"))
    prefix = _pair(tmp_path / "x", OF_PAIR)
    integrity.check_indexed_files(prefix)
    whole, sequences = Path(f"{prefix}.idx").read_bytes(), sum(length > 0 for length in OF_PAIR)
    lengths, pointers, documents = HEADER.size, HEADER.size + 4 * sequences, HEADER.size + 12 * sequences
    places = [lengths + 4 * number for number in range(sequences)]
    places += [pointers + 8 * number for number in range(sequences)]
    # A document less or more in the middle still rises: the first and the last entry are known.
    places += [documents, documents + 8 * len(OF_PAIR)]
    for place in places:
        Path(f"{prefix}.idx").write_bytes(whole[:place] + bytes([whole[place] + 1]) + whole[place + 1 :])
        with pytest.raises(DataError, match=r"the file is altered|belongs to other data"):
            integrity.check_indexed_files(prefix)
