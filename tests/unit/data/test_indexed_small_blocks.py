"""What is written, merged and checked some entries at a time is the same with a few entries at a time."""

import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from megatron_ext.cli import inspect_dataset
from megatron_ext.data import data_manifest as data_checksums
from megatron_ext.data import indexed, integrity, mask
from megatron_ext.data.indexed import HEADER, IndexedWriter
from megatron_ext.data.prepare import merge
from megatron_ext.errors import DataError


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


LENGTHS = [5, 0, 17, 1, 0, 0, 64, 3, 2, 2, 9, 0]


def test_data_checksums_read_in_pieces(tmp_path: Path, blocks_of: Callable[..., None]) -> None:
    prefix = _pair(tmp_path / "x", LENGTHS * 30)
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
    _pair(tmp_path / "whole", LENGTHS)
    blocks_of(documents, (indexed, "_DOCUMENTS_AT_ONCE"))
    _pair(tmp_path / "parts", LENGTHS)
    assert (tmp_path / "parts.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()


@pytest.mark.parametrize("block", [1, 3, 4])
def test_merged_and_summarized(block: int, tmp_path: Path, blocks_of: Callable[..., None]) -> None:
    prefixes = [_pair(tmp_path / "a", LENGTHS), _pair(tmp_path / "b", LENGTHS[::-1], 300)]
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
